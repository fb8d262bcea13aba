"""Folders that look as runs left them, for the tests of the report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megarl.config import Config, dump_config
from megarl.config.load import build_config
from megarl.telemetry.spans import SpanFile

PHASES = ("generate", "reward", "update", "wait")


def write_folder(folder: Path, *, steps: int = 12, seed: int = 0, **sections: Any) -> Path:
    """A run of `steps` steps: metrics, configuration, a timeline of three ranks, 4 rollouts a step."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    rows = [
        {"step": step, "reward/mean": step / steps, "actor/loss": rng.random() - 0.5, "timing/step_s": 2.0}
        for step in range(1, steps + 1)
    ]
    rows[-1]["val/accuracy"] = 0.75
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build_config(sections) if sections else Config()
    (folder / "config.yaml").write_text(dump_config(config))
    spans = SpanFile(str(folder))
    for step in range(1, steps + 1):
        late = [[(0, 0.0, 1.0), (2, 1.0, 0.9), (3, 0.4 + 0.6 * (rank == 1), 0.6 * (rank != 1))] for rank in range(3)]
        spans.write(step, "rl", 1.8e9 + 2.0 * step, PHASES, late)
    spans.close()
    (folder / "rollouts").mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        write_rollouts(folder, step, [rollout(step, sample) for sample in range(4)])
    return folder


def rollout(step: int, sample: int, **fields: Any) -> dict[str, Any]:
    """A record as a run of today writes it; the first sample of each step is right."""
    return {
        "prompt": f"{step % 3} + {step % 3} =",
        "response": f"{step} {sample}",
        "answer": "6",
        "reward": float(sample == 0),
        "index": step % 3,
        "group": step,
        "sample": sample,
        "source": "sums" if step % 2 else "products",
        "finish": "length" if sample == 3 else "stop",
        "length": 4,
        "parts": {"part/right": float(sample == 0), "part/short": 0.5},
        "tokens": [str(step), " ", str(sample), "</s>"],
        "logp": [-0.1, -3.0, None, -0.01],
        "advantage": [1.5, 1.5, -0.5, 0.0],
        "gap": [0.0, 0.002, -0.004, 0.0],
        **fields,
    }


def write_rollouts(folder: Path, step: int, records: list[dict[str, Any]]) -> Path:
    """One file of the folder `rollouts/`."""
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

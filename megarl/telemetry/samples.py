"""Sample rollouts of a step, as text that a person reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

_ALWAYS = ("prompt", "response", "answer", "reward")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response, decoded, and its score; None where scoring failed.

    Attributes:
        turns: of an episode, who said what: ("policy", "<calc>6*7</calc>"), ("environment", "42") ...; None: the policy
            spoke once.
        error: why an episode failed.
    """

    prompt: str
    response: str
    answer: str
    reward: float | None
    turns: tuple[tuple[str, str], ...] | None = None
    error: str | None = None


def write_samples(run_dir: str, step: int, samples: Iterable[Sample]) -> str:
    """Write `rollouts/step_000012.jsonl` below `run_dir`, one sample a line; returns the file's path."""
    path = os.path.join(run_dir, "rollouts", f"step_{step:06d}.jsonl")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        for sample in samples:
            shown = {key: value for key, value in asdict(sample).items() if key in _ALWAYS or value is not None}
            f.write(json.dumps(shown, ensure_ascii=False) + "\n")
    return path

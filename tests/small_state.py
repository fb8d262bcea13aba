"""Positions and small states of the checkpoints that tests write."""

from __future__ import annotations

from typing import Any

from megarl.checkpoint.folder import Position

STATE: dict[str, Any] = {"row": 0, "models": [], "identity": {}}
"""Values that a run puts into its small state, beside the position."""


def rl_step(step: int) -> Position:
    return Position(1, step, "rl")


def warmup_step(step: int) -> Position:
    return Position(0, step, "warmup")


def state_at(position: Position) -> dict[str, Any]:
    return {"step": position.step, "loop": position.loop, "order": position.order, **STATE}

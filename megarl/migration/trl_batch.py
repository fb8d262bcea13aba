"""Counts batches and steps from TRL's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Settings
from megarl.migration.trl_trainers import TRAINERS, A, trainer_of

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
}


def prompts_per_update(settings: Settings) -> int:
    """Count the prompts of an update. TRL counts sequences: GRPO and RLOO have `num_generations` to a prompt."""
    rows = _rows_per_pass(settings) * settings.number("gradient_accumulation_steps")
    default = TRAINERS[trainer_of(settings)].defaults.get("actor_rollout_ref.rollout.n", 1)
    return max(1, rows // settings.number("num_generations", settings.number("rloo_k", default)))


def updates_per_batch(settings: Settings) -> int:
    """Count the optimizer steps of one pass over a generated batch."""
    if not TRAINERS[trainer_of(settings)].generates:
        return 1
    passes, rows = settings.number("gradient_accumulation_steps"), settings.number("generation_batch_size", 0)
    steps = rows // _rows_per_pass(settings) or settings.number("steps_per_generation", passes)
    return max(1, steps // passes)


def batch_sizes(settings: Settings) -> dict[str, int]:
    """List MegaRL's keys of batch sizes with their values."""
    update = prompts_per_update(settings)
    sizes = {"data.train_batch_size": update * updates_per_batch(settings)}
    return sizes | ({f"{A}.ppo_mini_batch_size": update} if TRAINERS[trainer_of(settings)].generates else {})


def _rows_per_pass(settings: Settings) -> int:
    """Count the sequences of a forward and backward pass over all processes."""
    return settings.number("per_device_train_batch_size", 8) * settings.number("num_processes")

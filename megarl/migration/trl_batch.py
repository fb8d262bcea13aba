"""Batches and steps as TRL counts them."""

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
    """TRL counts sequences; those of GRPO and RLOO are responses, `num_generations` to a prompt."""
    rows = _rows_per_pass(settings) * settings.number("gradient_accumulation_steps")
    default = TRAINERS[trainer_of(settings)].defaults.get("actor_rollout_ref.rollout.n", 1)
    return max(1, rows // settings.number("num_generations", settings.number("rloo_k", default)))


def updates_per_batch(settings: Settings) -> int:
    """Optimizer steps of one pass over what is generated at a time."""
    if not TRAINERS[trainer_of(settings)].generates:
        return 1
    accumulated, generated = settings.number("gradient_accumulation_steps"), settings.number("generation_batch_size", 0)
    passed = generated // _rows_per_pass(settings)
    return max(1, (passed or settings.number("steps_per_generation", accumulated)) // accumulated)


def batch_sizes(settings: Settings) -> dict[str, int]:
    """The keys here."""
    update = prompts_per_update(settings)
    sizes = {"data.train_batch_size": update * updates_per_batch(settings)}
    return sizes | ({f"{A}.ppo_mini_batch_size": update} if TRAINERS[trainer_of(settings)].generates else {})


def _rows_per_pass(settings: Settings) -> int:
    """Sequences of a forward and backward pass, over all processes."""
    return settings.number("per_device_train_batch_size", 8) * settings.number("num_processes")

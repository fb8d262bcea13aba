"""Counts the bytes of the models beside the policy, phase by phase. Torch-free.

A rank's pipeline stage in another model's layout is not its stage in the policy's: every rank is counted as one of the
other model's fullest stage. A reward model with a tokenizer of its own is counted with the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from megarl.estimate.job import Job
from megarl.estimate.model import ModelJob
from megarl.estimate.model_memory import Items, forward, forward_and_backward, masters_of, state_of


def state_beside(job: Job) -> Items:
    """Count what all of them hold with every memory mode off."""
    return {item: nbytes for model in job.other_models for item, nbytes in _fullest(model, state_of).items()}


def passes_beside(job: Job) -> Iterator[tuple[str, Items]]:
    """Count what their passes hold in addition."""
    for model in job.other_models:
        if (phase := model.kind.forward) is not None:
            yield phase, _fullest(model, forward) | _fullest(model, partial(masters_of, phase=phase))
        if model.kind.update is not None:
            yield model.kind.update, _fullest(model, forward_and_backward)


def _fullest(model: ModelJob, items_of: Callable[[ModelJob, int], Items]) -> Items:
    """Take the items of the stage that has most bytes."""
    return max((items_of(model, stage) for stage in range(model.layout.pp)), key=lambda items: sum(items.values()))

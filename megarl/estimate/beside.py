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


def state_beside(job: Job, stage: int) -> Items:
    """Count what all of them hold on a rank of the policy's stage, with every memory mode off."""
    return {item: nbytes for model in job.models_beside for item, nbytes in _items(job, model, stage, state_of).items()}


def passes_beside(job: Job, stage: int) -> Iterator[tuple[str, Items]]:
    """Count what their passes hold in addition."""
    for model in job.models_beside:
        if (phase := model.kind.forward) is not None:
            masters = partial(masters_of, phase=phase)
            yield phase, _items(job, model, stage, forward) | _items(job, model, stage, masters)
        if model.kind.update is not None:
            yield model.kind.update, _items(job, model, stage, forward_and_backward)


def _items(job: Job, model: ModelJob, stage: int, items_of: Callable[[ModelJob, int], Items]) -> Items:
    """Take the items of the model's fullest stage; of a model that shares the policy's keys, of the policy's stage."""
    stages = [stage] if model.section == job.actor.section else range(model.layout.pp)
    return max((items_of(model, each) for each in stages), key=lambda items: sum(items.values()))

"""Looks for a split of the layers with which the policy's pipeline needs less time or memory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import StageBudget, budget
from megarl.estimate.budget_table import size
from megarl.estimate.job import Job
from megarl.estimate.model_memory import forward_and_backward, state_of
from megarl.estimate.prediction import Lengths, update_seconds
from megarl.parallel.pipeline_split import PipelineSplit, balanced, written
from megarl.phases import Phase

NOTICEABLE = 0.03
"""Part of the update's time, or of its memory, that is worth a line."""


@dataclass(frozen=True, kw_only=True)
class BetterSplit:
    """Compares an update with other stages to that of the configuration.

    Attributes:
        split: of the other stages.
        seconds, nbytes: of an update, and on its fullest GPU.
        instead_of: seconds and bytes as configured.
    """

    split: PipelineSplit
    seconds: float
    nbytes: int
    instead_of: tuple[float, int]

    def __str__(self) -> str:
        seconds, nbytes = self.instead_of
        changes = []
        if self.seconds < 0.99 * seconds:
            changes.append(f"update {self.seconds:.3g} s instead of {seconds:.3g} s")
        if self.nbytes < 0.99 * nbytes:
            changes.append(f"{size(self.nbytes)} instead of {size(nbytes)} on the fullest GPU of the update")
        return f"{self.split} would balance the stages: {' and '.join(changes)}"


def better_split(
    job: Job, accelerator: Accelerator, lengths: Lengths, stages: Sequence[StageBudget], *, moved: int
) -> BetterSplit | None:
    """Find the split that saves most of the update's time and memory and costs neither.

    Splits differ in the layers beside the embedding and in those beside the output; the stages between are equal, or
    differ by one.

    Args:
        stages, moved: of `budget`.

    Returns:
        None where keys set the split, or where nothing noticeable is saved.
    """
    if job.train.pp == 1 or job.train.split:
        return None
    seconds, state = _seconds(job, accelerator, lengths), _update_bytes(job)
    scored = []
    for other in _alternatives(job):
        time = _seconds(other, accelerator, lengths) / seconds
        if time <= 1 and (memory := _update_bytes(other) / state) <= 1:
            scored.append((time + memory, other))
    if not scored:
        return None
    best = min(scored, key=lambda pair: pair[0])[1]
    better = BetterSplit(
        split=best.train.split,
        seconds=_seconds(best, accelerator, lengths),
        nbytes=_fullest(budget(best, accelerator, moved=moved)),
        instead_of=(seconds, _fullest(stages)),
    )
    kept = min(better.seconds / seconds, better.nbytes / _fullest(stages))
    return better if kept <= 1 - NOTICEABLE else None


def _fullest(stages: Sequence[StageBudget]) -> int:
    return max(stage.total(Phase.UPDATE) for stage in stages)


def _seconds(job: Job, accelerator: Accelerator, lengths: Lengths) -> float:
    return update_seconds(job, job.actor, accelerator, lengths)


def _update_bytes(job: Job) -> int:
    model = job.actor
    return max(
        sum(state_of(model, stage).values()) + sum(forward_and_backward(model, stage).values())
        for stage in range(job.train.pp)
    )


def _alternatives(job: Job) -> Iterator[Job]:
    num_layers, parts = job.arch.num_layers, job.train.pp * job.train.chunks
    most = num_layers // parts + 2
    for first in range(most):
        for last in range(most) if parts > 2 else [num_layers - first]:
            middle = num_layers - first - last
            if middle >= parts - 2:
                counts = [first, *(balanced(middle, parts - 2, 1) if parts > 2 else []), last]
                yield replace(job, train=replace(job.train, split=_named(counts, job.train.chunks)))


def _named(counts: Sequence[int], chunks: int) -> PipelineSplit:
    """Set the keys of a split: the numbers of the first and the last stage where they say all, else the layout."""
    first, *middle, last = counts
    if chunks == 1 and first and last and len(set(middle)) <= 1:
        return PipelineSplit(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    return PipelineSplit(pipeline_model_parallel_layout=written(counts))

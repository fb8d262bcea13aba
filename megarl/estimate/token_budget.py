"""Finds the largest micro-batch of the policy for which a run's memory is enough. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import StageBudget, passes
from megarl.estimate.fit import RESERVE
from megarl.estimate.job import Job

STEP = 1024
"""Tokens between two sizes that are considered."""


def largest_token_budget(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> int | None:
    """Find the largest `actor.ppo_max_token_len_per_gpu`, in steps of `STEP`, that leaves `RESERVE` of the memory free.

    Args:
        stages: of `budget`.

    Returns:
        0 if none does; None where sequences are counted, not tokens. No more than all tokens that a rank passes for an
        optimizer step: a larger one would change nothing.
    """
    if not job.actor.batching.use_dynamic_bsz:
        return None
    room = (1 - RESERVE) * accelerator.memory
    unlimited = _with(job, tokens=10**12).actor
    everything = unlimited.rank_tokens(job.actor.forward_batch)
    beside = [(stage.stage, phase, nbytes) for stage in stages for phase, nbytes in _beside_passes(job, stage)]

    def fits(tokens: int) -> bool:
        changed = {stage.stage: passes(_with(job, tokens), stage.stage) for stage in stages}
        return all(nbytes + sum(changed[stage][phase].values()) <= room for stage, phase, nbytes in beside)

    return most_that_fit(everything, fits)


def most_that_fit(most: int, fit: Callable[[int], bool]) -> int:
    """Find the largest number of tokens that fits, in steps of `STEP`; 0 if none does.

    Args:
        most: no more are tried.
        fit: says of a number whether it fits, and so do all smaller ones.
    """
    fits, too_many = 0, most // STEP + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if fit(middle * STEP):
            fits = middle
        else:
            too_many = middle
    return fits * STEP


def _beside_passes(job: Job, stage: StageBudget) -> Iterator[tuple[str, int]]:
    """Yield the phases whose passes depend on the tokens of a micro-batch, with the bytes of all else in them."""
    least = passes(_with(job, 0), stage.stage)
    for phase, items in passes(job, stage.stage).items():
        if items != least[phase]:
            yield phase, stage.total(phase) - sum(items.values())


def _with(job: Job, tokens: int) -> Job:
    roles = job.config.actor_rollout_ref
    actor = roles.actor.model_copy(update={"ppo_max_token_len_per_gpu": tokens})
    changed = roles.model_copy(update={"actor": actor})
    return replace(job, config=job.config.model_copy(update={"actor_rollout_ref": changed}))

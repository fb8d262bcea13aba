"""Chooses the ranks of a rehearsal: as few as exercise the layout, and no more than this machine's memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psutil

from megarl.config import Config
from megarl.estimate.accelerator import H200
from megarl.estimate.budget import budget
from megarl.host import host_memory
from megarl.models.families import read_architecture
from megarl.rollout.kinds import NATIVE, engine_kind
from megarl.trainer.layouts import train_layout, with_ranks
from megarl.trainer.memory import job_of

SHARED_BYTES = 512 * 2**20
"""What a rehearsal takes whatever its ranks: modules, which all ranks share, and reward processes."""
RANK_BYTES = 128 * 2**20
"""What a rank takes beside its model: 32 ranks were seen to take 101 MiB each."""
OTHER_ENGINE_BYTES = 3 * 2**29
"""What a rank takes for an engine that is no part of this program, and so is not shared."""


def layouts(config: Config, most: int | None) -> Iterator[Config]:
    """Yield the configuration on the fewest ranks with two or more data-parallel ones, if it has them; then with one.

    Args:
        most: ranks.
    """
    counts = range(2, train_layout(config).dp + 1)
    several = (layout for count in counts if (layout := with_ranks(config, count)) is not None)
    for layout in (next(several, None), with_ranks(config, 1)):
        if layout is not None and (most is None or layout.trainer.world_size <= most):
            yield layout


def free_memory() -> int:
    """Return the bytes that more processes of this machine can hold."""
    return min(psutil.virtual_memory().available, host_memory())


def memory_of(small: Config) -> int:
    """Estimate the bytes that the ranks of a small run take together."""
    job = job_of(small, read_architecture(small.actor_rollout_ref.model.path))
    cpu_rank = replace(H200, name="CPU", runtime=0, offloads=False)
    each = RANK_BYTES + max(stage.peak for stage in budget(job, cpu_rank, moved=0))
    if job.generates and engine_kind(small.actor_rollout_ref.rollout.name) is not NATIVE:
        each += OTHER_ENGINE_BYTES
    return SHARED_BYTES + small.trainer.world_size * each

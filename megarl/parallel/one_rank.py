"""Makes this process the only rank of a world, for commands that run a model without a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megarl.parallel.cpu import enable_cpu_ranks
from megarl.parallel.meeting import follow_launcher
from megarl.parallel.train_groups import leave_groups
from megarl.parallel.world import World, init_distributed


@contextmanager
def one_rank(timeout_minutes: float = 30) -> Iterator[World]:
    """Join a world of one rank; it is left at the end, but not after an error, which ends the process.

    The variables of a surrounding job are removed: this process is none of its ranks.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    enable_cpu_ranks()  # before Megatron-Core is imported
    follow_launcher()
    init_distributed(timeout_minutes)
    world = World()
    yield world
    leave_groups(world)
    dist.destroy_process_group()

"""Makes a rank compute the same bits whenever it is given the same numbers (`trainer.deterministic`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS adds up in another order when a workspace has another size
    "NCCL_ALGO": "Ring",  # else NCCL chooses an order of addition, by what it measures of the links, too
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make every kernel of torch add up in a fixed order; one that cannot raises RuntimeError, naming itself.

    Megatron-Core's models that are built in this context, and Triton's kernels, which never add atomically, do as well.
    Enter it before the process uses its GPU: libraries read their variables once. A variable that is set already stays.

    Args:
        wanted: false: nothing changes.
    """
    if not wanted:
        yield
        return
    added = _ENVIRONMENT.keys() - os.environ.keys()
    os.environ.update({name: _ENVIRONMENT[name] for name in added})
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    cudnn = torch.backends.cudnn
    chosen = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a help to find faults, which takes a pass each time
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
        cudnn.benchmark, cudnn.deterministic = chosen

"""Runs the decode step in CUDA graphs: one launch in place of several hundred, which cost the host microseconds each.

A graph holds the addresses of everything it reads. Sleeping gives the weights' and the KV cache's memory back, and
waking takes it wherever it is free, so graphs are captured anew after every sleep, each when its batch size first
comes up; `forget` drops them. That costs one step's launches per batch size, and leaves weights and cache with torch's
ordinary allocator. (Fixed virtual addresses would save it, at the price of an allocator of our own.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def bucket(rows: int, most: int) -> int:
    """Choose the batch size to which so many rows are filled up: a power of two or a multiple of 64, at most `most`.

    A few rows take as long as one, since the step reads all weights; of many rows each takes its own time.
    """
    return min(1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64, most)


class DecodeGraphs:
    """Captures a step in a graph per batch size, and replays it.

    Args:
        step: int64 [rows, columns] on the GPU -> the step's output. Must neither read anything back on the host nor
            depend on the host's state.
        rows: of the largest batch.
        filling: int64 [1, columns], a row that belongs to no sequence: it fills batches up, and warms them up.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], *, rows: int, filling: Tensor, device: torch.device) -> None:
        self._step, self._filling = step, filling
        self._inputs = torch.zeros(rows, filling.shape[1], dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._warm: set[int] = set()

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows on the GPU, and the step's output for them. The next call overwrites both.

        Args:
            rows: int64 [count, columns], on the host.
        """
        size = bucket(len(rows), len(self._inputs))
        inputs = self._inputs[:size]
        if size not in self._graphs:
            self._graphs[size] = self._capture(inputs)
        filled = torch.cat((rows, self._filling.expand(size - len(rows), -1)))
        inputs.copy_(filled.pin_memory(), non_blocking=True)
        graph, output = self._graphs[size]
        graph.replay()
        return inputs[: len(rows)], output[: len(rows)]

    def forget(self) -> None:
        """Drop the graphs, before memory that the step reads is given back; one may still run."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()

    def _capture(self, inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if len(inputs) not in self._warm:
            # Compiling kernels and starting communicators cannot be captured; no sequence is to advance by it.
            inputs.copy_(self._filling.expand(len(inputs), -1))
            self._step(inputs)
            self._warm.add(len(inputs))
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g, _ in self._graphs.values()), None)  # graphs run one at a time and may share memory
        # "global" would make a thread that asks NCCL how far it is break the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = self._step(inputs)
        return graph, output

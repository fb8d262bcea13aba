"""Tells the decisions of a replica's first rank to its other ranks."""

from __future__ import annotations

import pickle
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Broadcast(Generic[T]):
    """Sends a value from the first rank to all; sends nothing where there is no other.

    Args:
        group: the replica's ranks, over gloo; None: one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Return whether this rank decides."""
        return self._group is None or self._group.rank() == 0

    def share(self, value: T | None) -> T | None:
        """Return the first rank's value, on every rank. None says that nothing was decided, and takes eight bytes.

        Args:
            value: of the first rank; the others' values are ignored.
        """
        if self._group is None:
            return value
        content = b"" if value is None or not self.leads else pickle.dumps(value)
        size = torch.tensor([len(content)], dtype=torch.int64)
        dist.broadcast(size, self._first, group=self._group)
        if not int(size):
            return None
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.leads else _room(int(size))
        dist.broadcast(data, self._first, group=self._group)
        if self.leads:
            return value
        received: T = pickle.loads(data.numpy().tobytes())
        return received


def _room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)

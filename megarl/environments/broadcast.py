"""What a replica's first rank decides, told to its other ranks."""

from __future__ import annotations

import pickle
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Broadcast(Generic[T]):
    """A word from the first rank to all; nothing is sent where there is no other.

    Args:
        group: the replica's ranks, over gloo; None: one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._group is None or self._group.rank() == 0

    def share(self, word: T | None) -> T | None:
        """The first rank's word, on every rank; None, which takes eight bytes, says that nothing was decided.

        Args:
            word: of the first rank; the others' is not looked at.
        """
        if self._group is None:
            return word
        content = b"" if word is None or not self.leads else pickle.dumps(word)
        size = torch.tensor([len(content)], dtype=torch.int64)
        dist.broadcast(size, self._first, group=self._group)
        if not int(size):
            return None
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.leads else _room(int(size))
        dist.broadcast(data, self._first, group=self._group)
        if self.leads:
            return word
        told: T = pickle.loads(data.numpy().tobytes())
        return told


def _room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)

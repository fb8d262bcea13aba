"""What all ranks agree on over gloo: the only collectives on the control group, each of them watched.

A rank that waits in one of them says for what, and the wait counts as none of its work.
"""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.watch import Watch

T = TypeVar("T")

_WATCHES: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


def watch_of(control: dist.ProcessGroup) -> Watch:
    """The watch of a group: the same one each time it is asked for."""
    return _WATCHES.setdefault(control, Watch())


def all_gather(control: dist.ProcessGroup, value: Any, what: str = "an exchange") -> list[Any]:
    """One Python object of every rank, in rank order.

    Args:
        what: what a rank waits for here, as it is told if others do not come: "all scores".
    """
    values: list[Any] = [None] * dist.get_world_size(control)
    with watch_of(control).waiting(what):
        dist.all_gather_object(values, value, group=control)
    return values


def gather(control: dist.ProcessGroup, value: T, what: str) -> list[T]:
    """One Python object of every rank, in rank order, on the first rank; nothing on the others."""
    first = dist.get_rank(control) == 0
    values: list[Any] = [None] * dist.get_world_size(control) if first else []
    with watch_of(control).waiting(what):
        dist.gather_object(value, values if first else None, group=control, group_dst=0)
    return values


def broadcast(control: dist.ProcessGroup, value: T | None, what: str) -> T:
    """The first rank's Python object, on all of them."""
    values: list[Any] = [value]
    with watch_of(control).waiting(what):
        dist.broadcast_object_list(values, group=control, group_src=0)
    received: T = values[0]
    return received


def broadcast_(control: dist.ProcessGroup, values: Tensor, what: str) -> Tensor:
    """The first rank's CPU tensor, into that of each other rank."""
    with watch_of(control).waiting(what):
        dist.broadcast(values, group=control, group_src=0)
    return values


def sum_(control: dist.ProcessGroup, values: Tensor, what: str) -> Tensor:
    """Add up a CPU tensor over the ranks, in place."""
    with watch_of(control).waiting(what):
        dist.all_reduce(values, group=control)
    return values


def exchange(control: dist.ProcessGroup, parts: list[Tensor], sizes: list[int], what: str) -> list[Tensor]:
    """A CPU tensor for each rank, in rank order, from each rank.

    Args:
        parts: of one axis and float32.
        sizes: elements that each rank gives this one.
    """
    received = torch.empty(sum(sizes))
    with watch_of(control).waiting(what):
        dist.all_to_all_single(received, torch.cat(parts), sizes, [len(part) for part in parts], group=control)
    return list(received.split(sizes))


def maximum_(control: dist.ProcessGroup, values: Tensor, what: str) -> Tensor:
    """The largest of the ranks' elements of a CPU tensor, in place."""
    with watch_of(control).waiting(what):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=control)
    return values


def maximum(control: dist.ProcessGroup, value: int, what: str = "an exchange") -> int:
    """The largest value of any rank."""
    return int(maximum_(control, torch.tensor(value, dtype=torch.int64), what))


def barrier(control: dist.ProcessGroup, what: str) -> None:
    """Wait for all ranks."""
    with watch_of(control).waiting(what):
        dist.barrier(control)

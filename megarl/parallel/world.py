"""Holds the ranks of the job, and exchanges what all of them agree on, over gloo.

Every exchange is watched: a rank that waits in one says for what, and the wait counts as none of its work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megarl.parallel.cpu import enable_cpu_ranks
from megarl.parallel.watch import Watch

T = TypeVar("T")

NCCL_GRACE = timedelta(minutes=5)
"""How much longer NCCL waits than `trainer.timeout_minutes`."""


def init_distributed(timeout_minutes: float = 30) -> None:
    """Join the job's ranks (environment set by the launcher, torchrun or srun): NCCL where there is a GPU, else gloo.

    A communicator of NCCL's takes half a GiB even if it has one rank. Megatron-Core makes more than a dozen groups, and
    a run uses some of them, so every group gets its own at its first collective: `init_process_group` is not told the
    device, which would give one to each at once.

    Args:
        timeout_minutes: how long a rank waits for others in any group, also in later ones.
    """
    enable_cpu_ranks()
    timeout = timedelta(minutes=timeout_minutes)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # what groups get whose maker, vLLM for one, names no limit; NCCL's own end comes after that of the watch, which
    # knows who is late
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout + NCCL_GRACE
    if backend == "nccl":
        timeout += NCCL_GRACE
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # without a launcher this process is a world of its own
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


class World:
    """Is the job's ranks, as one of them sees them.

    The exchanges carry small Python objects and CPU tensors (token ids, scores), never a model's weights at once.

    Attributes:
        rank: this process's.
        size: how many ranks there are.
        device: where this rank's tensors live.
        ranks_per_node: consecutive ranks that share a machine.
        watch: notes what this rank waits for.
    """

    def __init__(self, *, device: torch.device | None = None, control: dist.ProcessGroup | None = None) -> None:
        """Take part in the job that `init_distributed` joined. Every rank calls it.

        The groups wait as long as `init_distributed` was told.

        Args:
            device: default: this rank's GPU, or the CPU where there is none.
            control: all ranks, for the exchanges; default: a new group over gloo.
        """
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.device = device or here
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.watch = Watch()
        self._made: list[dist.ProcessGroup] = []
        self._control = control or self.new_group(range(self.size), backend="gloo")

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Make a group of some ranks. Every rank of the job calls it, in the group or not."""
        group = dist.new_group(ranks, backend=backend)
        self.note(group)
        return group

    def new_groups(self, parts: Iterable[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a group of each of some parts of the ranks; returns this rank's. Every rank of the job calls it.

        Args:
            parts: no two have a rank in common.
        """
        groups = [self.new_group(ranks, backend) for ranks in parts]
        return next((group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER), None)

    def note(self, *groups: dist.ProcessGroup) -> None:
        """Note groups that others made over these ranks, for `leave`."""
        self._made += groups

    def leave(self) -> None:
        """Leave all groups, in the order in which they were made; torch's world stays.

        NCCL's communicators are left together, and two ranks that begin with different ones wait for each other
        forever.
        """
        for group in dict.fromkeys(self._made):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._made.clear()

    def all_gather(self, value: Any, what: str = "an exchange") -> list[Any]:
        """Gather one Python object of every rank, in rank order.

        Args:
            what: names the wait if other ranks do not come: "all scores".
        """
        values: list[Any] = [None] * self.size
        with self.watch.waiting(what):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def gather(self, value: T, what: str) -> list[T]:
        """Gather one Python object of every rank, in rank order, on the first rank; nothing on the others."""
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        with self.watch.waiting(what):
            dist.gather_object(value, values if self.rank == 0 else None, group=self._control, group_dst=0)
        return values

    def broadcast(self, value: T | None, what: str = "an exchange") -> T:
        """Send the first rank's Python object to every rank; the other ranks' values are ignored."""
        values: list[Any] = [value]
        with self.watch.waiting(what):
            dist.broadcast_object_list(values, group=self._control, group_src=0)
        received: T = values[0]
        return received

    def broadcast_(self, values: Tensor, what: str) -> Tensor:
        """Send the first rank's CPU tensor into that of each other rank."""
        with self.watch.waiting(what):
            dist.broadcast(values, group=self._control, group_src=0)
        return values

    def sum_(self, values: Tensor, what: str) -> Tensor:
        """Add up a CPU tensor over the ranks, in place."""
        with self.watch.waiting(what):
            dist.all_reduce(values, group=self._control)
        return values

    def exchange(self, parts: list[Tensor], sizes: list[int], what: str) -> list[Tensor]:
        """Send a CPU tensor to each rank, and receive one from each, in rank order.

        Args:
            parts: of one axis and one type.
            sizes: elements that each rank gives this one.
        """
        received = torch.empty(sum(sizes), dtype=parts[0].dtype)
        with self.watch.waiting(what):
            dist.all_to_all_single(
                received, torch.cat(parts), sizes, [len(part) for part in parts], group=self._control
            )
        return list(received.split(sizes))

    def exchange_bytes(self, parts: list[bytes], what: str) -> list[bytes]:
        """Send bytes to each rank, and receive some from each, in rank order."""
        sizes = self.exchange([torch.tensor([len(part)]) for part in parts], [1] * self.size, what)
        sent = [
            torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0).byte() for part in parts
        ]
        return [bytes(part.numpy()) for part in self.exchange(sent, [int(size) for size in sizes], what)]

    def maximum(self, value: int, what: str = "an exchange") -> int:
        """Find the largest value of any rank."""
        most = torch.tensor(value, dtype=torch.int64)
        with self.watch.waiting(what):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._control)
        return int(most)

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        with self.watch.waiting(what):
            dist.barrier(self._control)


def join(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give the group its communicator; every rank of it calls this.

    A batch of sends and receives, from which ranks may stay away, must not be the first to need it.
    """
    dist.all_reduce(torch.zeros((), device=device), group=group)

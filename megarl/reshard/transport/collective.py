"""Moves pieces between ranks over a process group: packed into flat byte buckets, exchanged in rounds, unpacked.

All that goes from one rank to another is a stream of bytes: the pieces in planned order, each starting at a multiple
of `ALIGNMENT`. Every pair cuts its stream into the same number of equal steps, one per round, so a round is as full
for a pair with much to send as for one with little, and both ends know every boundary. In round k a rank deals only
with round k of its peers: no cycle of waiting can arise.

Two sets of buckets alternate. While round k travels, k + 1 is packed and k - 1 unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.reshard.views import StridedView

ALIGNMENT = 16
"""Bytes. A multiple of every element size, so that a cut never falls into an element and copies can be vectorised."""

Streams = Mapping[int, Sequence[StridedView]]
"""Views by peer (global rank), in the order in which they travel."""


@dataclass(frozen=True, eq=False, slots=True)
class _Slot:
    """Pairs a view and the byte of the bucket at which its elements start."""

    view: StridedView
    start: int

    def within(self, bucket: torch.Tensor) -> torch.Tensor:
        flat = bucket[self.start : self.start + self.view.nbytes]
        return flat.view(self.view.parameter.dtype).view(self.view.size)


@dataclass(frozen=True, eq=False, slots=True)
class _Message:
    """Describes what goes to or comes from one peer in one round: bytes `start` to `stop` of the bucket."""

    peer: int
    start: int
    stop: int
    slots: tuple[_Slot, ...]


class CollectiveTransport:
    """Moves views of this rank's parameters into views of its peers', again and again.

    Building one is a collective call over the group.

    Args:
        sends, receives: what goes to and comes from each peer. The peer names the same sizes in the same order.
        group: the group of all ranks that may be peers.
        device: where the group's tensors live.
        bucket_bytes: bound on what a rank has in flight in one direction in one round, summed over its peers. The
            extra memory during a run is at most four times that: two directions, two rounds.

    Raises:
        ValueError: bucket_bytes is too small for the group.
    """

    def __init__(
        self,
        sends: Streams,
        receives: Streams,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._group, self._device = group, device
        smallest = ALIGNMENT * dist.get_world_size(group)
        if bucket_bytes < smallest:
            raise ValueError(f"bucket_bytes = {bucket_bytes} is too small for this group; use at least {smallest}")
        rounds = torch.tensor(max(1, *(_rounds(streams, bucket_bytes) for streams in (sends, receives))), device=device)
        # Besides agreeing on the rounds, this makes NCCL set up its communicator with every rank of the group; a batch
        # of sends and receives, from which ranks without peers stay away, must not be the first to need it.
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group)
        self._sends = _schedule(sends, int(rounds))
        self._receives = _schedule(receives, int(rounds))

    @property
    def rounds(self) -> int:
        """Count the rounds of a run, the same on every rank of the group; at least one."""
        return len(self._sends)

    @property
    def buffer_bytes(self) -> int:
        """Count the extra memory held during a run."""
        return min(2, self.rounds) * (_bucket_size(self._sends) + _bucket_size(self._receives))

    def run(self, meanwhile: Callable[[int], None]) -> None:
        """Move everything once.

        Args:
            meanwhile: called with the number of every round while it travels. Keep it shorter than a round: the next
                one, already packed, is posted after it.
        """
        rounds = self.rounds
        outgoing = [self._bucket(self._sends) for _ in range(min(2, rounds))]
        incoming = [self._bucket(self._receives) for _ in range(min(2, rounds))]

        def pack(k: int) -> None:
            for slot in (slot for message in self._sends[k] for slot in message.slots):
                slot.within(outgoing[k % 2]).copy_(slot.view.tensor())

        def unpack(k: int) -> None:
            for slot in (slot for message in self._receives[k] for slot in message.slots):
                slot.view.tensor().copy_(slot.within(incoming[k % 2]))

        def post(k: int) -> list[dist.Work]:
            there = {m.peer: outgoing[k % 2][m.start : m.stop] for m in self._sends[k]}
            here = {m.peer: incoming[k % 2][m.start : m.stop] for m in self._receives[k]}
            return post_exchange(there, here, self._group)

        pack(0)
        travelling = post(0)
        for k in range(rounds):
            if k + 1 < rounds:
                pack(k + 1)
            meanwhile(k)
            for work in travelling:
                work.wait()
            if k + 1 < rounds:
                travelling = post(k + 1)
            unpack(k)

    def _bucket(self, schedule: list[list[_Message]]) -> torch.Tensor:
        return torch.empty(_bucket_size(schedule), dtype=torch.uint8, device=self._device)


def post_exchange(
    there: Mapping[int, torch.Tensor], here: Mapping[int, torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start sending a tensor to every peer of `there` and receiving one from every peer of `here` (global ranks)."""
    ops = [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in there.items()]
    ops += [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in here.items()]
    return dist.batch_isend_irecv(ops) if ops else []


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _stream_bytes(views: Sequence[StridedView]) -> int:
    return sum(_aligned(view.nbytes) for view in views)


def _rounds(streams: Streams, bucket_bytes: int) -> int:
    """Count the rounds in which streams fit into buckets although each peer's step is rounded up to the alignment."""
    total = sum(_stream_bytes(views) for views in streams.values())
    return -(-total // (bucket_bytes - ALIGNMENT * len(streams)))


def _schedule(streams: Streams, rounds: int) -> list[list[_Message]]:
    """List the messages of every round, laid end to end in the round's bucket."""
    schedule: list[list[_Message]] = [[] for _ in range(rounds)]
    for peer, views in streams.items():
        total = _stream_bytes(views)
        step = _aligned(-(-total // rounds))
        starts = [messages[-1].stop if messages else 0 for messages in schedule]
        for k, slots in _cut(views, step, starts).items():
            stop = starts[k] + min(step, total - k * step)
            schedule[k].append(_Message(peer=peer, start=starts[k], stop=stop, slots=tuple(slots)))
    return schedule


def _cut(views: Sequence[StridedView], step: int, starts: Sequence[int]) -> dict[int, list[_Slot]]:
    """Cut a stream into steps of `step` bytes; the slots of each round, which begins at byte `starts[round]`."""
    out: dict[int, list[_Slot]] = {}
    at = 0
    for view in views:
        size, end = view.parameter.element_size(), at + view.nbytes
        for k in range(at // step, -(-end // step)):
            lo, hi = max(at, k * step), min(end, (k + 1) * step)
            start = starts[k] + lo - k * step
            for part in view.flat_range((lo - at) // size, (hi - at) // size):
                out.setdefault(k, []).append(_Slot(part, start))
                start += part.nbytes
        at = _aligned(end)
    return out


def _bucket_size(schedule: list[list[_Message]]) -> int:
    return max(messages[-1].stop if messages else 0 for messages in schedule)

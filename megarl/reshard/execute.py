"""Carries out a plan: resolves its placements into views of parameters once, then moves the bytes on demand."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megarl.models.placements import Placement
from megarl.reshard.plan import Piece, Plan, Transform
from megarl.reshard.transport.collective import CollectiveTransport
from megarl.reshard.transport.direct_reads import Pair
from megarl.reshard.transport.peer import PeerTransport
from megarl.reshard.views import StridedView, copy_local, view_of


@dataclass(frozen=True, kw_only=True)
class ReshardStatistics:
    """Counts what one reshard moves on one rank, bytes.

    Attributes:
        local: copied within the rank.
        sent, received: to and from other ranks, without padding.
        pulled: the part of `received` that is read from the peers' memory, in which they do nothing.
        buffers: extra memory while it runs.
    """

    local: int
    sent: int
    received: int
    pulled: int
    buffers: int


class Resharder:
    """Writes the actor's weights from the training parameters into the engine's, in place, bit for bit.

    GPUs of one host read each other's memory, where it can be mapped; all else travels in buckets. Which pairs of
    ranks do which is settled by both of them together, anew whenever parameters that others read have moved. Ranks of a
    host that take shares from another host then exchange them, in buckets.

    Built once; building is a collective call over the group. The tensors of both mappings must stay the live
    parameters. Their storage may move between runs (`parameter.data = ...`), and this process holds none of it here;
    before training parameters are given back to the driver, `release` what the peers have mapped of it.

    Args:
        plan: of this rank.
        source: training parameters by the names of `training_placements`; empty on a rank that only takes.
        destination: engine parameters by the names of `engine_placements`; empty on a rank that only gives.
        group: the ranks of this rank's block, see `sides.blocks`.
        transport: `actor_rollout_ref.reshard.transport`.
        bucket_bytes: see `CollectiveTransport`.
        buffers: names of the logical tensors that are float32 on both sides, whatever the type of the weights.

    Attributes:
        local: source and destination view of each of `plan.local`.
        sends, receives: by peer, the view of each piece of `plan.sends` and `plan.receives`.
        relay_sends, relay_receives: likewise; all are the engine's.
        peer: reads the memory of other ranks of the host; None where that is impossible.
        statistics: of a run, as was settled last.

    Raises:
        ValueError: a parameter is missing or has not the shape or dtype that the plan needs.
    """

    statistics: ReshardStatistics

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        *,
        transport: Literal["auto", "collective"] = "auto",
        bucket_bytes: int,
        buffers: Container[str] = (),
    ) -> None:
        sent = [piece for pieces in plan.sends.values() for piece in pieces]
        written = [*plan.local, *(p for pieces in plan.receives.values() for p in pieces)]
        taken = [piece for piece in (*plan.local, *sent) if piece.transform is None]
        first = next(iter((destination or source).values()))
        _check_parameters("training", source, (p.source for p in taken), first.dtype, buffers)
        _check_parameters("engine", destination, (p.destination for p in written), first.dtype, buffers)
        self._transformed: list[tuple[StridedView, Transform, torch.Tensor]] = []

        def read(piece: Piece) -> StridedView:
            view = view_of(source[piece.source.param], piece.source, piece.source_part)
            if piece.transform is None:
                return view
            result = torch.empty(0, dtype=first.dtype, device=first.device)
            self._transformed.append((view, piece.transform, result))
            stride = tuple(math.prod(view.size[axis + 1 :]) for axis in range(len(view.size)))
            return StridedView(result, view.size, stride, 0)

        def write(piece: Piece) -> StridedView:
            return view_of(destination[piece.destination.param], piece.destination, piece.destination_part)

        self.plan, self.group = plan, group
        self.local = [(read(piece), write(piece)) for piece in plan.local]
        self.sends = {peer: [read(piece) for piece in pieces] for peer, pieces in plan.sends.items()}
        self.receives = {peer: [write(piece) for piece in pieces] for peer, pieces in plan.receives.items()}
        # a relayed piece has the same place at both ends
        self.relay_sends = {peer: [write(piece) for piece in pieces] for peer, pieces in plan.relay_sends.items()}
        self.relay_receives = {peer: [write(piece) for piece in pieces] for peer, pieces in plan.relay_receives.items()}
        self._device, self._bucket_bytes = first.device, bucket_bytes
        self._direct: frozenset[Pair] | None = None
        self.peer: PeerTransport | None = None
        if transport == "auto" and first.device.type == "cuda":
            assert not self._transformed, "peers read parameters as they are: transforms need transport='collective'"
            self.peer = PeerTransport(
                self.local,
                {peer: list(zip(plan.receives[peer], views, strict=True)) for peer, views in self.receives.items()},
                {piece.source.param: source[piece.source.param] for piece in sent},
                group,
                device=first.device,
            )
        self._relay = CollectiveTransport(
            self.relay_sends, self.relay_receives, group, device=first.device, bucket_bytes=bucket_bytes
        )
        self._connect()

    @torch.no_grad()
    def run(self) -> None:
        """Reshard once. Every rank of the group calls it; on a GPU it is finished when the current stream is."""
        peer = self.peer
        for view, transform, result in self._transformed:
            result.data = transform(view.tensor()).contiguous()
        if peer is None:
            self._collective.run(meanwhile=lambda k: copy_local(self.local[k :: self._collective.rounds]))
        else:
            if not peer.ready():
                self._connect()
            # an even share of the copies per round: all of them during the first would hold up the second
            self._collective.run(meanwhile=lambda k: peer.copy(k, self._collective.rounds))
            peer.finish()
        if self._relay.buffer_bytes:
            self._relay.run(meanwhile=lambda _: None)

    def release(self) -> None:
        """Let go of the memory of other ranks, which the next run maps anew. Every rank of the group calls it.

        Call it before training parameters move for good: memory that a peer has mapped is not free.
        """
        for _, _, result in self._transformed:
            result.data = result.new_empty(0)
        if self.peer is not None:
            self.peer.release()

    def _connect(self) -> None:
        """Settle who reads whose memory; what is left over is the collective transport's."""
        direct = self.peer.connect().direct if self.peer is not None else frozenset()
        if direct == self._direct:
            return
        self._direct, rank = direct, dist.get_rank()
        self._collective = CollectiveTransport(
            {peer: views for peer, views in self.sends.items() if (rank, peer) not in direct},
            {peer: views for peer, views in self.receives.items() if (peer, rank) not in direct},
            self.group,
            device=self._device,
            bucket_bytes=self._bucket_bytes,
        )
        pulled = [views for peer, views in self.receives.items() if (peer, rank) in direct]
        self.statistics = ReshardStatistics(
            local=sum(view.nbytes for view, _ in self.local),
            sent=_nbytes((*self.sends.values(), *self.relay_sends.values())),
            received=_nbytes((*self.receives.values(), *self.relay_receives.values())),
            pulled=_nbytes(pulled),
            buffers=max(self._collective.buffer_bytes, self._relay.buffer_bytes)
            + (self.peer.table_bytes if self.peer is not None else 0),
        )


def _nbytes(streams: Iterable[Iterable[StridedView]]) -> int:
    return sum(view.nbytes for views in streams for view in views)


def _check_parameters(
    side: str,
    parameters: Mapping[str, torch.Tensor],
    placements: Iterable[Placement],
    weights: torch.dtype,
    buffers: Container[str],
) -> None:
    """Raise ValueError if a placement does not fit its parameter. More rows than placed are vocabulary padding."""
    for placement in placements:
        name, (start, stop) = placement.param, placement.rows
        if name not in parameters:
            raise ValueError(f"the {side} model has no parameter {name}, which should hold {placement.tensor}")
        parameter = parameters[name]
        columns, rest = divmod(math.prod(placement.view), stop - start)
        if parameter.shape[0] < stop or rest or math.prod(parameter.shape[1:]) != columns:
            raise ValueError(
                f"{side} parameter {name} has shape {list(parameter.shape)}, but {placement.tensor} needs its rows "
                f"{start} to {stop} with {columns} elements each; check the {side} layout against the model's"
            )
        dtype, other = weights, "the engine's first parameter"
        if placement.tensor in buffers:
            dtype, other = torch.float32, placement.tensor
        if parameter.dtype != dtype:
            raise ValueError(
                f"{side} parameter {name} is {parameter.dtype}, but {other} is {dtype}; "
                f"the reshard copies bits, so give both models one dtype"
            )
        if not parameter.is_contiguous():
            raise ValueError(f"{side} parameter {name} is not contiguous; the reshard views its rows in place")

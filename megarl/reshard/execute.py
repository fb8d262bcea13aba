"""Carries out a plan: resolves its placements into views of real parameters once, then moves the bytes on demand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.models.tensors import Placement
from megarl.reshard.plan import Piece, Plan
from megarl.reshard.transport.collective import CollectiveTransport
from megarl.reshard.transport.local import copy_local
from megarl.reshard.views import StridedView, view_of


@dataclass(frozen=True, kw_only=True)
class ReshardStatistics:
    """What one reshard moves on one rank, bytes.

    Attributes:
        local: copied within the rank.
        sent, received: to and from other ranks, without padding.
        buffers: extra memory while it runs.
    """

    local: int
    sent: int
    received: int
    buffers: int


class Resharder:
    """Writes the actor's weights from the training parameters into the engine's, in place, bit for bit.

    Built once; building is a collective call over the group. The tensors of both mappings must stay the live
    parameters. Their storage may move between runs (`parameter.data = ...`), and none of it is held here.

    Args:
        plan: of this rank.
        source: training parameters by the names of `training_placements`.
        destination: engine parameters by the names of `engine_placements`.
        group: the ranks of this rank's model-parallel block.
        bucket_bytes: see `CollectiveTransport`.

    Attributes:
        plan, group: as given.
        local: source and destination view of each of `plan.local`.
        sends, receives: by peer, the view of each piece of `plan.sends` and `plan.receives`.
        statistics: what a run moves.

    Raises:
        ValueError: a parameter is missing or has not the shape or dtype that the plan needs.
    """

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
    ) -> None:
        taken = [*plan.local, *(p for pieces in plan.sends.values() for p in pieces)]
        written = [*plan.local, *(p for pieces in plan.receives.values() for p in pieces)]
        first = next(iter(destination.values()))
        _check_parameters("training", source, (p.source for p in taken), first.dtype)
        _check_parameters("engine", destination, (p.destination for p in written), first.dtype)

        def read(piece: Piece) -> StridedView:
            return view_of(source[piece.source.param], piece.source, piece.source_part)

        def write(piece: Piece) -> StridedView:
            return view_of(destination[piece.destination.param], piece.destination, piece.destination_part)

        self.plan, self.group = plan, group
        self.local = [(read(piece), write(piece)) for piece in plan.local]
        self.sends = {peer: [read(piece) for piece in pieces] for peer, pieces in plan.sends.items()}
        self.receives = {peer: [write(piece) for piece in pieces] for peer, pieces in plan.receives.items()}
        self._transport = CollectiveTransport(
            self.sends, self.receives, group, device=first.device, bucket_bytes=bucket_bytes
        )
        # A share of the local copies per round: all of them during the first would hold up the second.
        self._shares = [self.local[k :: self._transport.rounds] for k in range(self._transport.rounds)]
        self.statistics = ReshardStatistics(
            local=sum(view.nbytes for view, _ in self.local),
            sent=sum(view.nbytes for views in self.sends.values() for view in views),
            received=sum(view.nbytes for views in self.receives.values() for view in views),
            buffers=self._transport.buffer_bytes,
        )

    @torch.no_grad()
    def run(self) -> None:
        """One reshard. Every rank of the group calls it; on a GPU it is finished when the current stream is."""
        self._transport.run(meanwhile=lambda k: copy_local(self._shares[k]))


def _check_parameters(
    side: str, parameters: Mapping[str, torch.Tensor], placements: Iterable[Placement], dtype: torch.dtype
) -> None:
    """Raises ValueError if a placement does not fit its parameter. More rows than placed are vocabulary padding."""
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
        if parameter.dtype != dtype:
            raise ValueError(
                f"{side} parameter {name} is {parameter.dtype}, but the engine's first parameter is {dtype}; "
                f"the reshard copies bits, so give both models one dtype"
            )
        if not parameter.is_contiguous():
            raise ValueError(f"{side} parameter {name} is not contiguous; the reshard views its rows in place")

"""Moves pieces within a host: every rank pulls them straight out of its peers' GPU memory, nothing staged.

The memory of a peer's parameters is mapped once, and again only after it has moved. All that a rank copies, from its
peers and from its own memory, is then one kernel. The owner of the memory has nothing to do but to leave it alone;
`ready` and `finish` see to that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.kernels import TRITON
from megarl.models.placements import geometry
from megarl.reshard.plan import Piece
from megarl.reshard.transport import cuda_ipc
from megarl.reshard.transport.copies import COPY, rectangles
from megarl.reshard.transport.direct_reads import Agreement, Offer, agree, first_in_job, host_identity
from megarl.reshard.views import StridedView, copy_local

if TYPE_CHECKING:
    from megarl.reshard.transport.copy_kernel import FusedCopy


class PeerTransport:
    """Moves pieces of parameters into this rank's own, again and again. For ranks on GPUs.

    Args:
        local: source and destination of what the rank has itself.
        receives: by peer, what that one has for this rank, and where it goes.
        offered: this rank's parameters from which others take, by name.
        group: the ranks that may be peers.

    Attributes:
        fused: the copies of which this rank's pulls consist, once connected; None without Triton.
    """

    def __init__(
        self,
        local: Sequence[tuple[StridedView, StridedView]],
        receives: Mapping[int, Sequence[tuple[Piece, StridedView]]],
        offered: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        device: torch.device,
    ) -> None:
        self._group, self._device, self._rank = group, device, dist.get_rank()
        self._local, self._offered = local, dict(offered)
        views = [*(view for pair in local for view in pair), *(view for peer in receives.values() for _, view in peer)]
        self._own = list({id(view.parameter): view.parameter for view in views}.values())
        self._taken = {
            peer: list(dict.fromkeys(piece.source.param for piece, _ in pieces)) for peer, pieces in receives.items()
        }
        self._copies = _copies(self._own, self._taken, local, receives, rank=self._rank)
        self._told: list[int] | None = None
        self._exported: list[cuda_ipc.Allocation] = []
        self._mapped: dict[int, _Mapped] = {}
        self.fused: FusedCopy | None = None
        self._links: set[int] = set()

    @property
    def table_bytes(self) -> int:
        """Count the extra memory that the transport holds."""
        return self.fused.nbytes if self.fused else 0

    def connect(self) -> Agreement:
        """Map the memory of all peers that can be mapped, anew. Every rank of the group calls it.

        Returns:
            which pairs of the group's ranks will move their pieces here; the others need another transport.
        """
        self._unmap()
        agreement, self._mapped = agree(self._offer(), self._taken, self._open, self._group)
        links = {self._rank, *self._mapped}
        if TRITON and links != self._links:
            from megarl.reshard.transport.copy_kernel import FusedCopy

            of_links = np.isin(self._copies["link"], list(links))
            self.fused, self._links = FusedCopy(self._copies[of_links], self._device), links
        if self.fused:
            self.fused.place(self._bases())
        for (source, taker), why in agreement.refused.items():
            if taker == self._rank and first_in_job("reshard_without_peer_memory"):
                warnings.warn(
                    f"rank {taker} cannot read the GPU memory of rank {source} ({why}): between such ranks weights "
                    f"travel in buckets, which is slower and needs more memory; "
                    f"actor_rollout_ref.reshard.transport=collective chooses that for all",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return agreement

    def ready(self) -> bool:
        """Say whether all mapped memory is where the parameters are now. Every rank calls it; all get the same answer.

        What any rank did to its parameters before is done for all that follows on this rank's stream.
        """
        here = self._told == _addresses(self._offered.values()) and all(map(cuda_ipc.still_there, self._exported))
        away = torch.full((), not here, dtype=torch.int32, device=self._device)
        dist.all_reduce(away, dist.ReduceOp.MAX, self._group)
        return not away.item()

    def copy(self, share: int, shares: int) -> None:
        """Start an even share of all copies, number `share` of `shares`, on the current stream."""
        if self.fused is None:
            copy_local(self._local[share::shares])
            return
        self.fused.place(self._bases())
        self.fused.run(share, shares)

    def finish(self) -> None:
        """Make this rank's stream wait until no peer reads this rank's memory. Every rank calls it."""
        dist.all_reduce(torch.zeros((), dtype=torch.int32, device=self._device), group=self._group)

    def release(self) -> None:
        """Unmap everything. Every rank calls it; afterwards their memory can be given back to the driver."""
        torch.cuda.current_stream(self._device).synchronize()
        self._unmap()
        self._told = None
        self.ready()

    def _offer(self) -> Offer:
        self._told, self._exported = _addresses(self._offered.values()), []
        numbers: dict[cuda_ipc.Allocation, int] = {}
        places = {}
        try:
            for name, address in zip(self._offered, self._told, strict=True):
                allocation = cuda_ipc.allocation_at(address)
                places[name] = numbers.setdefault(allocation, len(numbers)), address - allocation.start
            handles = tuple(map(cuda_ipc.export_handle, numbers))
        except OSError as e:
            why = f"{e}: memory of expandable segments, PYTORCH_CUDA_ALLOC_CONF, cannot be shared"
            return Offer(host=host_identity(), refusal=why)
        self._exported = list(numbers)
        return Offer(host=host_identity(), handles=handles, places=places)

    def _open(self, source: int, offer: Offer) -> _Mapped:
        if not TRITON:
            raise OSError("Triton is not installed")
        places = [offer.places[name] for name in self._taken[source]]
        starts: dict[int, int] = {}
        try:
            for number, _ in places:
                if number not in starts:
                    starts[number] = cuda_ipc.open_handle(offer.handles[number])
        except OSError:
            for start in starts.values():
                cuda_ipc.close_handle(start)
            raise
        return _Mapped(starts=list(starts.values()), addresses=[starts[number] + offset for number, offset in places])

    def _unmap(self) -> None:
        for mapped in self._mapped.values():
            for start in mapped.starts:
                cuda_ipc.close_handle(start)
        self._mapped = {}

    def _bases(self) -> np.ndarray:
        """Return the addresses of the memories that the copies name by number; 0 for memory that is not mapped."""
        bases = _addresses(self._own)
        for peer, names in self._taken.items():
            bases += self._mapped[peer].addresses if peer in self._mapped else [0] * len(names)
        return np.array(bases, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """Holds addresses of a peer's memory.

    Attributes:
        starts: addresses of the mapped allocations.
        addresses: of the parameters that this rank takes from.
    """

    starts: list[int]
    addresses: list[int]


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _copies(
    own: Sequence[Tensor],
    taken: Mapping[int, Sequence[str]],
    local: Sequence[tuple[StridedView, StridedView]],
    receives: Mapping[int, Sequence[tuple[Piece, StridedView]]],
    *,
    rank: int,
) -> np.ndarray:
    """List all copies that this rank may make, of dtype COPY; the link is the source's rank.

    Memories are numbered: first the rank's own parameters, then those taken of each peer.
    """
    number = {id(parameter): i for i, parameter in enumerate(own)}
    remote = {key: len(own) + i for i, key in enumerate((peer, name) for peer in taken for name in taken[peer])}
    rows: list[tuple[int, ...]] = []

    def add(link: int, source: int, stride: tuple[int, ...], offset: int, to: StridedView) -> None:
        size, destination = to.parameter.element_size(), number[id(to.parameter)]
        for a, b, n, columns, stride_a, stride_b in rectangles(to.size, stride, to.stride):
            offsets = size * (offset + a), size * (to.offset + b)
            rows.append((link, source, destination, *offsets, n, size * columns, size * stride_a, size * stride_b))

    for view, to in local:
        add(rank, number[id(view.parameter)], view.stride, view.offset, to)
    for peer, pieces in receives.items():
        for piece, to in pieces:
            _, stride, offset = geometry(piece.source, piece.source_part)
            add(peer, remote[peer, piece.source.param], stride, offset, to)
    return np.array(rows, dtype=COPY)

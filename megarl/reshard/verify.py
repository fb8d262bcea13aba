"""Checks that a reshard was exact, without gathering any tensor: bit checksums of every piece at its two ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megarl.models.bits import bits_of
from megarl.reshard.execute import Resharder
from megarl.reshard.plan import Piece, Pieces
from megarl.reshard.transport.collective import post_exchange
from megarl.reshard.views import StridedView

CHUNK = 1 << 22
"""Elements summed at a time: bounds the extra memory to some 100 MB."""


@torch.no_grad()
def verify(resharder: Resharder) -> None:
    """Compare what the engine holds with what the training parameters hold. Every rank of the group calls it.

    Raises:
        RuntimeError: on the rank whose engine parameters differ; names the tensors and the ranks they came from.
    """
    plan, group = resharder.plan, resharder.group
    wrong: list[Piece] = []
    if resharder.local:
        sources, destinations = zip(*resharder.local, strict=True)
        wrong += _differing(plan.local, _checksums(sources), _checksums(destinations))
    wrong += _differing_from_peers(plan.receives, resharder.sends, resharder.receives, group)
    wrong += _differing_from_peers(plan.relay_receives, resharder.relay_sends, resharder.relay_receives, group)
    if wrong:
        named = ", ".join(f"{p.tensor} (rank {p.source_rank} to rank {p.destination_rank})" for p in wrong[:5])
        raise RuntimeError(f"{len(wrong)} pieces differ from their source after the reshard, first: {named}")


def checksum(view: StridedView) -> torch.Tensor:
    """Add up over the elements bits x (i (i + 1) + 1) modulo 2^64, i being the row-major index. An int64 scalar.

    Integers, so the order of summation does not matter and NaN and -0 count as what they are. The weights are odd, so
    a change of one element always shows. So does a swap of two: it changes the sum by (a - b) (i - j) (i + j + 1); of
    the last two factors one is odd, hence below 2^32 elements of at most 32 bits the product is no multiple of 2^64.
    The weights are not linear in i, since swapping two blocks of equal sums would go unnoticed.
    """
    total = torch.zeros((), dtype=torch.int64, device=view.parameter.device)
    for start in range(0, view.numel, CHUNK):
        stop = min(start + CHUNK, view.numel)
        i = torch.arange(start, stop, device=total.device)
        bits = [bits_of(part.tensor()).to(torch.int64) for part in view.flat_range(start, stop)]
        total += (torch.cat(bits) * (i * (i + 1) + 1)).sum()
    return total


def _differing_from_peers(
    pieces: Mapping[int, Pieces],
    sends: Mapping[int, Sequence[StridedView]],
    receives: Mapping[int, Sequence[StridedView]],
    group: dist.ProcessGroup,
) -> list[Piece]:
    """Find the received pieces that differ from their source."""
    there = {peer: _checksums(views) for peer, views in sends.items()}
    arrived = {peer: _checksums(views) for peer, views in receives.items()}
    here = {peer: torch.empty_like(sums) for peer, sums in arrived.items()}
    for work in post_exchange(there, here, group):
        work.wait()
    return [wrong for peer, sums in here.items() for wrong in _differing(pieces[peer], sums, arrived[peer])]


def _checksums(views: Sequence[StridedView]) -> torch.Tensor:
    return torch.stack([checksum(view) for view in views])


def _differing(pieces: Pieces, sent: torch.Tensor, arrived: torch.Tensor) -> list[Piece]:
    return [pieces[i] for i in (sent != arrived).nonzero().flatten().tolist()]

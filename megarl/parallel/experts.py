"""Says how ranks that hold layers together divide the experts. Pure Python: no torch, no process groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """Locates a rank among those that hold the experts of a layer together.

    Attributes:
        tp, rank: number of ranks that share each expert, and the place among them.
        ep, part: number of parts into which the experts are dealt out, and the rank's part.
    """

    tp: int = 1
    rank: int = 0
    ep: int = 1
    part: int = 0

    def own(self, count: int) -> range:
        """Number the experts, of so many in a layer, that the rank has, or has a share of."""
        return dealt_out(count, self.ep)[self.part]


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """Says how tensor-parallel ranks divide layers: they share every matrix, but for those of experts.

    Attributes:
        tp: the ranks.
        ep: parts into which they deal the experts out. 1: each has a share of every expert; `tp`: each has whole
            experts, the first rank the first of them.
    """

    tp: int = 1
    ep: int = 1

    @staticmethod
    def of_replica(tp: int, *, enable_expert_parallel: bool) -> TensorSplit:
        """Divide layers over the ranks of a generation replica, as `rollout.enable_expert_parallel` says."""
        return TensorSplit(tp=tp, ep=tp if enable_expert_parallel else 1)

    @property
    def expert_tp(self) -> int:
        """Count the ranks that share each expert."""
        return self.tp // self.ep

    def expert_place(self, rank: int) -> ExpertPlace:
        """Locate one of the ranks."""
        part, share = divmod(rank, self.expert_tp)
        return ExpertPlace(tp=self.expert_tp, rank=share, ep=self.ep, part=part)

    def expert_parts(self, count: int) -> list[range]:
        """Number the experts, of so many in a layer, that are dealt out together."""
        return dealt_out(count, self.ep)


def dealt_out(count: int, parts: int) -> list[range]:
    """Divide so many experts, or none, into equal parts of neighbours."""
    each = count // parts
    return [range(first, first + each) for first in range(0, count, each)] if count else []

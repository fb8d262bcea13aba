"""Describes the ways in which context-parallel ranks share sequences: what layouts, checks and budgets ask. Torch-free.

What the ranks send each other around attention is in `megarl.models.exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ContextKind:
    """Describes ranks that have parts of the same sequences.

    Attributes:
        name: value of `megatron.cp_comm_type`.
        splits_heads: each rank attends to all tokens with some heads; else for its own tokens with all heads.
        pieces: runs of neighbouring columns that a rank has of a packed row. Of two it has the r-th from the begin and
            the r-th from the end: later tokens see more, so that all ranks have about as much to do.
        remark: what a layout adds to the number of ranks.
        no_padding: why ranks cannot share padded sequences; empty: they can.
        proposed: whether `megarl plan` proposes it where sequences are shared in another way, or not at all.
    """

    name: str
    splits_heads: bool
    pieces: int
    remark: str = ""
    no_padding: str = ""
    proposed: bool = False

    def check_heads(self, ranks: int, heads: int, kv_heads: int) -> None:
        """Raise ValueError, with what to change, unless so many ranks can share attention.

        Args:
            heads, kv_heads: of a tensor-parallel rank.
        """
        if self.splits_heads and (heads % ranks or (kv_heads % ranks and ranks % kv_heads)):
            raise ValueError(
                f"context_parallel_size = {ranks}: attention splits the {heads} query heads and {kv_heads} KV heads of "
                "a tensor-parallel rank over these ranks, which must divide the former, and divide the latter or be a "
                f"multiple of them; cp_comm_type={ALL_GATHER.name} splits no heads"
            )

    def copied_keys(self, ranks: int, copies: float) -> float:
        """Count the copies of a layer's keys and values that a pass makes, in those of a rank's tokens.

        Args:
            copies: of one rank alone, for prompts that sequences share.
        """
        if self.splits_heads:
            return copies
        # one for each piece, and backwards gradients are added up in float32, of keys and then of values
        return self.pieces * max(1.0, copies) * (ranks + 0.5) + ranks


ALL_TO_ALL = ContextKind(name="a2a", splits_heads=True, pieces=1)
"""Exchanges heads for tokens around attention (DeepSpeed-Ulysses, arXiv 2309.14509)."""
ALL_GATHER = ContextKind(
    name="all_gather",
    splits_heads=False,
    pieces=2,
    remark=" (gathered keys)",
    no_padding="padded sequences are not cut so that ranks have as much to attend",
    proposed=True,
)
"""Brings the keys and values of all tokens to each rank (arXiv 2407.21783, section 3.3.2)."""
CONTEXT_KINDS = {kind.name: kind for kind in (ALL_TO_ALL, ALL_GATHER)}

"""Exchanges heads for tokens between context-parallel ranks, around attention (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_tokens_of_some_heads(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Turn this rank's tokens, with all heads, into all tokens, with this rank's heads.

    Every rank of the group calls it.

    Args:
        parts: [n, ..., heads, dim] each, of queries, keys and values. Where there are fewer key heads than ranks, some
            ranks get the same.

    Returns: [ranks * n, ..., heads / ranks, dim] each.
    """
    size = group.size()
    if size == 1:
        return parts
    return [_Exchange.apply(_at_least(x, size), group, True) for x in parts]


def some_tokens_of_all_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Turn all tokens, with this rank's heads, back: [ranks * n, ..., heads / ranks, dim] -> [n, ..., heads, dim]."""
    if group.size() == 1:
        return x
    exchanged: Tensor = _Exchange.apply(x, group, False)
    return exchanged


def _at_least(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of x if there are fewer than `heads`."""
    return x if x.shape[-2] >= heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


class _Exchange(torch.autograd.Function):
    """Is an all-to-all, and the opposite one backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, gather_tokens: bool) -> Tensor:
        ctx.group, ctx.gather_tokens = group, gather_tokens
        return _exchanged(x, group, gather_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, not ctx.gather_tokens), None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, gather_tokens: bool) -> Tensor:
    size = group.size()
    if gather_tokens:
        sent = x.unflatten(-2, (size, -1)).movedim(-3, 0).contiguous()  # a part of the heads for each rank
    else:
        sent = x.unflatten(0, (size, -1)).contiguous()  # a part of the tokens for each rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1) if gather_tokens else received.movedim(0, -3).flatten(-3, -2)

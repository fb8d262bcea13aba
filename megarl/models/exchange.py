"""Exchanges queries, keys and values between ranks that share sequences, for each `parallel.context.ContextKind`.

Each rank has some tokens, with all heads of a tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.parallel.context import ALL_GATHER, ALL_TO_ALL


@dataclass(frozen=True)
class ExchangedHeads:
    """Has each rank attend to all tokens with some heads. Where there are fewer key heads than ranks, some ranks get
    the same."""

    group: dist.ProcessGroup

    def before_attention(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn queries, keys and values of this rank's tokens, [n, ..., heads, dim] each, into those with which it
        attends. Every rank of the group calls it."""
        if self.group.size() == 1:
            return query, key, value
        return self._all_tokens(query), self._all_tokens(key), self._all_tokens(value)

    def after_attention(self, out: Tensor) -> Tensor:
        """Turn the output of attention into that at this rank's tokens, [n, ..., heads, dim]. Every rank of the group
        calls it."""
        if self.group.size() == 1:
            return out
        exchanged: Tensor = _Exchange.apply(out, self.group, False)
        return exchanged

    def own_heads(self, values: Tensor) -> Tensor:
        """Take from values [heads, ...] those of the heads with which this rank attends."""
        return values.chunk(self.group.size())[self.group.rank()]

    def _all_tokens(self, x: Tensor) -> Tensor:
        exchanged: Tensor = _Exchange.apply(_at_least(x, self.group.size()), self.group, True)
        return exchanged


@dataclass(frozen=True)
class GatheredKeys:
    """Has each rank attend with all heads to the keys and values of all tokens."""

    group: dist.ProcessGroup

    def before_attention(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExchangedHeads.before_attention`."""
        return query, self._gathered(key), self._gathered(value)

    def after_attention(self, out: Tensor) -> Tensor:
        """See `ExchangedHeads.after_attention`."""
        return out

    def own_heads(self, values: Tensor) -> Tensor:
        """See `ExchangedHeads.own_heads`."""
        return values

    def _gathered(self, x: Tensor) -> Tensor:
        gathered: Tensor = gather_from_sequence_parallel_region(x, group=self.group)
        return gathered


EXCHANGES: dict[str, type[ExchangedHeads] | type[GatheredKeys]] = {
    ALL_TO_ALL.name: ExchangedHeads,
    ALL_GATHER.name: GatheredKeys,
}


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
    """Turn a rank's tokens with all heads into all tokens with its heads, [ranks * n, ..., heads / ranks, dim]; or
    back."""
    size = group.size()
    if gather_tokens:
        sent = x.unflatten(-2, (size, -1)).movedim(-3, 0).contiguous()  # a part of the heads for each rank
    else:
        sent = x.unflatten(0, (size, -1)).contiguous()  # a part of the tokens for each rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1) if gather_tokens else received.movedim(0, -3).flatten(-3, -2)

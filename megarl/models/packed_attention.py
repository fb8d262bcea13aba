"""Calls torch's causal attention, for sequences that lie one after another and for padded ones."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class SharedKeys:
    """Says which keys and values each sequence sees, where sequences have some in common.

    A sequence's queries are the last tokens of its keys.

    Attributes:
        rows: int64 [keys], the token of each key, sequence after sequence; None: `k` and `v` have them in this order.
        cu_seqlens, longest, slots: of the keys, as `packed_attention` has them of the queries.
    """

    rows: Tensor | None
    cu_seqlens: Tensor
    longest: int
    slots: Tensor


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    longest: int,
    slots: Tensor,
    shared: SharedKeys | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend: half precision on a GPU by `varlen_attn` (FlashAttention), sinks and everything else by a padded view.

    Args:
        q: [tokens, heads, head_dim].
        k: [tokens, kv_heads, head_dim], of what `shared` says.
        v: [tokens, kv_heads, value_dim], likewise; value_dim is no more than head_dim.
        cu_seqlens: int32 [sequences + 1], where each sequence begins, and the end of the last.
        longest: tokens of the longest sequence.
        slots: int64 [tokens], each token's place in the padded [sequences * longest] view.
        shared: the keys of each sequence; None: those of its own tokens.
        window: tokens that a token sees, itself the last of them; None: all up to itself.
        scale: what products of queries and keys are multiplied by; None: 1 / sqrt(head_dim).
        sinks: [heads], a logit that takes part in each head's softmax, and counts for nothing else.

    Returns: [tokens, heads, value_dim].
    """
    keys = shared or SharedKeys(rows=slots, cu_seqlens=cu_seqlens, longest=longest, slots=slots)
    if shared is not None and shared.rows is not None:
        k, v = _Taken.apply(k, shared.rows), _Taken.apply(v, shared.rows)
    if q.is_cuda and q.dtype != torch.float32 and sinks is None:
        return _varlen(q, k, v, (cu_seqlens, keys.cu_seqlens, longest, keys.longest), window, scale)
    rows = len(cu_seqlens) - 1

    def padded(x: Tensor, slots: Tensor, longest: int) -> Tensor:
        return x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, slots, x).view(rows, longest, *x.shape[1:])

    mask = None
    if shared is not None:
        before = shared.cu_seqlens.diff() - cu_seqlens.diff()
        mask = seen(longest, window, q.device, keys=shared.longest, before=before)
    parts = padded(q, slots, longest), padded(k, keys.slots, keys.longest), padded(v, keys.slots, keys.longest)
    out = padded_attention(*parts, window=window, scale=scale, sinks=sinks, mask=mask)
    return out.flatten(0, 1)[slots]


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend: [batch, length, heads, head_dim] -> the same. Causality hides the padding at the end from the rest.

    Args:
        mask: bool [batch, queries, keys], what is seen, in place of causality and window.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None and window is not None and window < q.shape[2]:
        mask = seen(q.shape[2], window, q.device)
    if sinks is not None:
        grouped = q.unflatten(1, (k.shape[1], -1))
        mask = seen(q.shape[2], window, q.device) if mask is None else mask
        sinks = sinks.view(k.shape[1], -1, 1, 1)
        out = attend_with_sinks(grouped, k.unsqueeze(2), v.unsqueeze(2), mask[..., None, None, :, :], sinks, scale)
        return out.flatten(1, 2).transpose(1, 2)
    rule: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask.unsqueeze(-3)}
    out = scaled_dot_product_attention(q, k, v, **rule, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scale: float | None) -> Tensor:
    """Attend, the softmax in float32 with one more logit, of which nothing is taken.

    Args:
        q: [..., queries, head_dim].
        k, v: [..., tokens, head_dim].
        mask: bool [..., queries, tokens], what is seen.
        sinks: [..., queries or 1, 1].

    Returns: [..., queries, head_dim].
    """
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def seen(
    length: int, window: int | None, device: torch.device, *, keys: int | None = None, before: Tensor | None = None
) -> Tensor:
    """Mark the tokens that each token of a sequence sees: bool [length, length].

    Args:
        keys, before: tokens of the longest sequence, and int64 [sequences], those of each before the first of `length`;
            the marks are [sequences, length, keys] then.
    """
    of_key, place = torch.arange(keys or length, device=device), torch.arange(length, device=device)[:, None]
    if before is not None:
        place = before[:, None, None] + place
    mask = of_key <= place
    return mask if window is None else mask & (of_key > place - window)


class _Taken(torch.autograd.Function):
    """Takes rows, some several times; their gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (grad,) = ctx.saved_tensors, grads
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=torch.float32).index_add_(0, rows, grad.float())
        return total.to(grad.dtype), None


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Call FlashAttention.

    Args:
        lengths: where sequences begin among queries and among keys, and the longest of each.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11's takes fewer key than query heads as they are, later ones must be told
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    before = -1 if window is None else window - 1
    more: dict[str, Any] = grouped | {"scale": q.shape[-1] ** -0.5 if scale is None else scale}
    value_dim, width = v.shape[-1], -(-q.shape[-1] // 8) * 8
    # FlashAttention 2 has one width for queries, keys and values, a multiple of 8
    q, k, v = (pad(x, (0, width - x.shape[-1])).contiguous() if x.shape[-1] < width else x for x in (q, k, v))
    # queries that are fewer than keys are the last of them
    out = varlen_attn(q, k, v.contiguous(), *lengths, window_size=(before, 0), **more)
    assert isinstance(out, Tensor)
    return out[..., :value_dim]

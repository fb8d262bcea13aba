"""Calls torch's causal attention, for sequences that lie one after another and for padded ones."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    longest: int,
    slots: Tensor,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend: half precision on a GPU by `varlen_attn` (FlashAttention), sinks and everything else by a padded view.

    Args:
        q: [tokens, heads, head_dim].
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, value_dim], which is no more than head_dim.
        cu_seqlens: int32 [sequences + 1], where each sequence begins, and the end of the last.
        longest: tokens of the longest sequence.
        slots: int64 [tokens], each token's place in the padded [sequences * longest] view.
        window: tokens that a token sees, itself the last of them; None: all up to itself.
        scale: what products of queries and keys are multiplied by; None: 1 / sqrt(head_dim).
        sinks: [heads], a logit that takes part in each head's softmax, and counts for nothing else.

    Returns: [tokens, heads, value_dim].
    """
    if q.is_cuda and q.dtype != torch.float32 and sinks is None:
        return _varlen(q, k, v, cu_seqlens, longest, window, scale)
    rows = len(cu_seqlens) - 1

    def padded(x: Tensor) -> Tensor:
        return x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, slots, x).view(rows, longest, *x.shape[1:])

    out = padded_attention(padded(q), padded(k), padded(v), window=window, scale=scale, sinks=sinks)
    return out.flatten(0, 1)[slots]


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend: [batch, length, heads, head_dim] -> the same. Causality hides the padding at the end from the rest."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if sinks is not None:
        grouped = q.unflatten(1, (k.shape[1], -1))
        mask = seen(q.shape[2], window, q.device)
        out = attend_with_sinks(grouped, k.unsqueeze(2), v.unsqueeze(2), mask, sinks.view(k.shape[1], -1, 1, 1), scale)
        return out.flatten(1, 2).transpose(1, 2)
    matters = window is not None and window < q.shape[2]
    rule: dict[str, Any] = {"attn_mask": seen(q.shape[2], window, q.device)} if matters else {"is_causal": True}
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


def seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Mark the tokens that each token of a sequence sees: bool [length, length]."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: int | None, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11's takes fewer key than query heads as they are, later ones must be told
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    before = -1 if window is None else window - 1
    more: dict[str, Any] = grouped if scale is None else grouped | {"scale": scale}
    value_dim = v.shape[-1]
    v = pad(v, (0, q.shape[-1] - value_dim))  # FlashAttention 2 has one width for keys and values
    rows = (cu_seqlens, cu_seqlens, longest, longest)
    out = varlen_attn(q, k, v.contiguous(), *rows, window_size=(before, 0), **more)
    assert isinstance(out, Tensor)
    return out[..., :value_dim]

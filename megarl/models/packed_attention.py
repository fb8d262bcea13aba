"""Calls torch's causal attention, for sequences that lie one after another and for padded ones."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, longest: int, slots: Tensor, scale: float | None = None
) -> Tensor:
    """Attend: half precision on a GPU by `varlen_attn` (FlashAttention), everything else by a padded view.

    Args:
        q: [tokens, heads, head_dim].
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, value_dim], which is no more than head_dim.
        cu_seqlens: int32 [sequences + 1], where each sequence begins, and the end of the last.
        longest: tokens of the longest sequence.
        slots: int64 [tokens], each token's place in the padded [sequences * longest] view.
        scale: what products of queries and keys are multiplied by; None: 1 / sqrt(head_dim).

    Returns: [tokens, heads, value_dim].
    """
    if q.is_cuda and q.dtype != torch.float32:
        return _varlen(q, k, v, cu_seqlens, longest, scale)
    rows = len(cu_seqlens) - 1

    def padded(x: Tensor) -> Tensor:
        return x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, slots, x).view(rows, longest, *x.shape[1:])

    return padded_attention(padded(q), padded(k), padded(v), scale=scale).flatten(0, 1)[slots]


def padded_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Attend: [batch, length, heads, head_dim] -> the same. Causality hides the padding at the end from the rest."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11's takes fewer key than query heads as they are, later ones must be told
    more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    more |= {} if scale is None else {"scale": scale}
    value_dim = v.shape[-1]
    v = pad(v, (0, q.shape[-1] - value_dim))  # FlashAttention 2 has one width for keys and values
    out = varlen_attn(q, k, v.contiguous(), cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **more)
    assert isinstance(out, Tensor)
    return out[..., :value_dim]

"""Calls torch's causal grouped-query attention, for sequences that lie one after another and for padded ones."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def packed_attention(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, longest: int, slots: Tensor) -> Tensor:
    """Attend: half precision on a GPU by `varlen_attn` (FlashAttention), everything else by a padded view.

    Args:
        q: [tokens, heads, head_dim].
        k, v: [tokens, kv_heads, head_dim].
        cu_seqlens: int32 [sequences + 1], where each sequence begins, and the end of the last.
        longest: tokens of the longest sequence.
        slots: int64 [tokens], each token's place in the padded [sequences * longest] view.

    Returns: [tokens, heads, head_dim].
    """
    if q.is_cuda and q.dtype != torch.float32:
        return _varlen(q, k, v, cu_seqlens, longest)
    rows = len(cu_seqlens) - 1

    def pad(x: Tensor) -> Tensor:
        return x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, slots, x).view(rows, longest, *x.shape[1:])

    return padded_attention(pad(q), pad(k), pad(v)).flatten(0, 1)[slots]


def padded_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend: [batch, length, heads, head_dim] -> the same. Causality hides the padding at the end from the rest."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11's takes fewer key than query heads as they are, later ones must be told
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(q, k, v.contiguous(), cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out

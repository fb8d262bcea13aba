"""Attention for the two kinds of forward pass: whole prompts, and one new token of every running sequence."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.rollout.native.kv_cache import KVCache, round_length


class Attention(Protocol):
    """Called once per layer with the rotated queries and keys of a flat batch of tokens."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores keys and values, returns what the queries attend to.

        Args:
            q: [T, heads, head_dim].
            k, v: [T, kv_heads, head_dim].

        Returns: [T, heads * head_dim].
        """
        ...


class PrefillAttention:
    """`sequences` prompts of `length` tokens each, padded on the right, into the slots from `first_slot` on.

    Causal attention keeps the padding from the prompt's tokens, so no mask is needed. The padding's keys and values
    land in positions that decoding overwrites before it reads them.
    """

    def __init__(self, cache: KVCache, *, first_slot: int, sequences: int, length: int) -> None:
        self._cache = cache
        self._first_slot = first_slot
        self._rectangle = (sequences, length)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, self._rectangle).transpose(1, 2) for x in (q, k, v))
        self._cache.write_prompts(layer, self._first_slot, k, v)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class DecodeAttention:
    """Token i is the newest of the sequence in slot i and attends to that slot up to its own position.

    The queries that share a KV head are treated as so many query tokens of one head: they are at the same position,
    and grouped-query attention with a mask would otherwise copy the keys and values once per query head on CUDA.

    Args:
        positions: int64 [T], of each token in its sequence.
        longest: max(positions) + 1, known to the caller without asking the device.
        dtype: of the queries.
    """

    def __init__(self, cache: KVCache, *, positions: Tensor, longest: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._positions, self._slots = positions, torch.arange(len(positions), device=positions.device)
        self._length = round_length(longest)
        hidden = torch.arange(self._length, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
        self._mask = mask[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write_tokens(layer, self._slots, self._positions, k, v)
        keys = self._cache.keys[layer, : len(q), :, : self._length]
        values = self._cache.values[layer, : len(q), :, : self._length]
        out = scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)), keys, values, attn_mask=self._mask)
        return out.flatten(1)

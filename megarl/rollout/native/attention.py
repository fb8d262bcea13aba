"""Attention for the two kinds of forward pass: whole prompts, and one new token of every running sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.models.packed_attention import packed_attention
from megarl.models.rope import apply_rope
from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.native.kv_cache import KVCache


class Attention(Protocol):
    """Called once per layer with the queries, keys and values of a flat batch of tokens, not yet rotated."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotates queries and keys, stores keys and values, returns what the queries attend to.

        Args:
            q: [T, heads, head_dim].
            k, v: [T, kv_heads, head_dim].

        Returns: [T, heads * head_dim].
        """
        ...


class PrefillAttention:
    """The first `lengths[i]` tokens of the sequence in `slots[i]`, one sequence after another.

    Args:
        rope: [max_model_len, 2, head_dim / 2], as of `rope_table`.
    """

    def __init__(self, cache: KVCache, rope: Tensor, *, slots: Sequence[int], lengths: Sequence[int]) -> None:
        device, self._cache = rope.device, cache
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])
        self._longest = max(lengths)
        self._padded = (rows * self._longest + positions).to(device)
        self._slots, self._positions = torch.tensor(slots)[rows].to(device), positions.to(device)
        self._cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        self._cos_sin = rope[self._positions]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rope(q, self._cos_sin), apply_rope(k, self._cos_sin)
        self._cache.write(layer, self._slots, self._positions, k, v)
        out = packed_attention(q, k, v, cu_seqlens=self._cu_seqlens, longest=self._longest, slots=self._padded)
        return out.flatten(1)


class GatheredAttention:
    """Token i is the newest of the sequence in slots[i] and attends to that sequence up to its own position.

    Gathers the blocks of every sequence, up to the longest's, then is torch's attention. The queries that share a KV
    head are treated as so many query tokens of one head: they are at the same position, and grouped-query attention
    with a mask would otherwise copy the keys and values once per query head on CUDA.

    Args:
        rope: [max_model_len, 2, head_dim / 2], as of `rope_table`.
        slots, positions: int64 [T].
        longest: max(positions) + 1, known to the caller without asking the device.
    """

    def __init__(self, cache: KVCache, rope: Tensor, *, slots: Tensor, positions: Tensor, longest: int) -> None:
        self._cache, self._slots, self._positions = cache, slots, positions
        self._cos_sin = rope[positions]
        self._blocks = blocks_for(longest)
        hidden = torch.arange(self._blocks * BLOCK_SIZE, device=rope.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=rope.dtype, device=rope.device).masked_fill_(hidden, float("-inf"))
        self._mask = mask[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rope(q, self._cos_sin), apply_rope(k, self._cos_sin)
        self._cache.write(layer, self._slots, self._positions, k, v)
        keys, values = self._cache.read(layer, self._slots, self._blocks)
        out = scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)), keys, values, attn_mask=self._mask)
        return out.flatten(1)

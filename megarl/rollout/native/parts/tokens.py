"""Knows where the tokens of a forward pass lie in their sequences and in the KV cache, and what they may attend to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.models.packed_attention import SharedKeys, attend_with_sinks, packed_attention
from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.parallel.upload import upload
from megarl.rollout.native.kv_cache import KVCache


class PrefillTokens:
    """Knows of the first `lengths[i]` tokens of the sequence in `slots[i]`, one sequence after another.

    Args:
        rope: [max_model_len, 2, rotary_dim / 2], as of `rope_table`.
        start: tokens before these, which the cache has already; of one sequence alone, unless 0.

    Attributes:
        cos_sin: rows of `rope` at the tokens' positions.
    """

    def __init__(
        self, cache: KVCache, rope: Tensor, *, slots: Sequence[int], lengths: Sequence[int], start: int = 0
    ) -> None:
        assert start == 0 or len(slots) == 1
        device, self._cache = rope.device, cache
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        places = torch.cat([torch.arange(n) for n in lengths])
        self._longest = max(lengths)
        self._padded = upload(rows * self._longest + places, device)
        self._slots, self._positions = upload(torch.tensor(slots)[rows], device), upload(start + places, device)
        self._cu_seqlens = upload(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)
        self._end = start + self._longest
        self._shared = _all_tokens(self._end, device) if start else None
        self.cos_sin = rope[self._positions]

    def store(self, layer: int, *heads: Tensor) -> None:
        """Write what the cache keeps of the tokens, see `KVCache.write`."""
        self._cache.write(layer, self._slots, self._positions, *heads)

    def seen(self, layer: int, *heads: Tensor) -> Sequence[Tensor]:
        """Return what the cache keeps of the tokens, and of those before them: each [tokens, heads, width].

        Args:
            heads: that of the tokens themselves, which has been stored.
        """
        if self._shared is None:
            return heads
        stored = self._cache.read(layer, self._slots[:1], blocks_for(self._end))[:, 0, :, : self._end]
        return stored.transpose(1, 2).contiguous().unbind(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **rule: Any) -> Tensor:
        """Attend causally within each sequence; the rest of `packed_attention`'s arguments are `rule`.

        Args:
            k, v: of what is `seen`.
        """
        places: dict[str, Any] = dict(
            cu_seqlens=self._cu_seqlens, longest=self._longest, slots=self._padded, shared=self._shared
        )
        return packed_attention(q, k, v, **places, **rule)


def _all_tokens(end: int, device: torch.device) -> SharedKeys:
    """Say that the tokens of a sequence see all before them, up to `end`."""
    tokens = torch.arange(end, device=device)
    cu_seqlens = torch.tensor([0, end], dtype=torch.int32, device=device)
    return SharedKeys(rows=None, cu_seqlens=cu_seqlens, longest=end, slots=tokens)


class Places:
    """Knows where new tokens are: i, of the sequence in slots[i].

    Args:
        rope: [max_model_len, 2, rotary_dim / 2], as of `rope_table`.
        slots, positions: int64 [T].

    Attributes:
        cos_sin: rows of `rope` at the tokens' positions.
    """

    def __init__(self, cache: KVCache, rope: Tensor, *, slots: Tensor, positions: Tensor) -> None:
        self.cache, self.slots, self.positions = cache, slots, positions
        self.cos_sin = rope[positions]

    def store(self, layer: int, *heads: Tensor) -> None:
        """Write what the cache keeps of the tokens, see `KVCache.write`."""
        self.cache.write(layer, self.slots, self.positions, *heads)


class NewTokens(Places):
    """Knows of new tokens that attend to their sequences up to their own positions.

    Gathers the blocks of every sequence, up to the longest's, then calls torch's attention. The queries that share a KV
    head are treated as so many query tokens of one head: they are at the same position, and grouped-query attention
    with a mask would otherwise copy the keys and values once per query head on CUDA.

    Args:
        longest: max(positions) + 1, which the caller knows without asking the device.
        window: tokens that a token sees, itself the last of them; None: all up to itself.
    """

    def __init__(
        self,
        cache: KVCache,
        rope: Tensor,
        *,
        slots: Tensor,
        positions: Tensor,
        longest: int,
        window: int | None = None,
    ) -> None:
        super().__init__(cache, rope, slots=slots, positions=positions)
        self._blocks = blocks_for(longest)
        tokens = torch.arange(self._blocks * BLOCK_SIZE, device=rope.device)
        hidden = tokens > positions[:, None]
        if window is not None:
            hidden |= tokens <= positions[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=rope.dtype, device=rope.device).masked_fill_(hidden, float("-inf"))
        self._mask = mask[:, None, None]

    def gather(self, layer: int) -> Tensor:
        """Read what the cache keeps of the tokens' sequences, see `KVCache.read`."""
        return self.cache.read(layer, self.slots, self._blocks)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend: q [T, heads, head_dim], keys and values [T, kv_heads, tokens, ...] -> [T, heads, value_dim]."""
        q = q.unflatten(1, (keys.shape[1], -1))
        if sinks is not None:
            seen, sinks = self._mask == 0, sinks.view(keys.shape[1], -1, 1)
            return attend_with_sinks(q, keys, values, seen, sinks, scale).flatten(1, 2)
        return scaled_dot_product_attention(q, keys, values, attn_mask=self._mask, scale=scale).flatten(1, 2)

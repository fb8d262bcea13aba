"""Computes grouped-query attention in the native engine: over whole prompts, and over new tokens of running sequences.

Its inputs are not yet rotated: q [T, heads, head_dim], k and v [T, kv_heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.models.packed_attention import attend_with_sinks, packed_attention
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.rms_norm import rms_norm
from megarl.models.rope import apply_rope, rope_table
from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.native import kernels
from megarl.rollout.native.kv_cache import KVCache
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.part import Attention

_QKV, _BIAS, _O = "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "self_attn.o_proj.weight"
_O_BIAS, _SINKS = "self_attn.o_proj.bias", "self_attn.sinks"
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class Weights(part.AttentionWeights):
    """Holds qkv [(heads + 2 kv_heads) * head_dim, hidden], o [hidden, heads * head_dim], of the heads on this rank."""

    def __init__(self, kind: GroupedQuery, weights: Mapping[str, Tensor], *, tp: int, eps: float) -> None:
        self._qkv, self._o = weights[_QKV], weights[_O]
        self._bias, self._q_norm, self._k_norm = (weights.get(name) for name in (_BIAS, *_NORMS))
        (self._heads, self._kv_heads), self._dim, self._eps = kind.heads(tp), kind.head_dim, eps
        self._zero_centered, self._sinks = kind.zero_centered_norms, weights.get(_SINKS)
        self._o_bias, self._tp = weights.get(_O_BIAS), tp

    @staticmethod
    def shapes(kind: GroupedQuery, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        (heads, kv_heads), dim = kind.heads(tp), kind.head_dim
        rows = (heads + 2 * kv_heads) * dim
        return {
            _QKV: (rows, hidden),
            **({_BIAS: (rows,)} if kind.qkv_bias else {}),
            **(dict.fromkeys(_NORMS, (dim,)) if kind.qk_norm else {}),
            _O: (hidden, heads * dim),
            **({_O_BIAS: (hidden,)} if kind.output_bias else {}),
            **({_SINKS: (heads,)} if kind.sinks else {}),
        }

    def __call__(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        qkv = F.linear(x, self._qkv, self._bias).unflatten(1, (-1, self._dim))
        q, k, v = qkv.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._norm(q, self._q_norm), self._norm(k, self._k_norm)
        bias = None if self._o_bias is None else self._o_bias / self._tp  # all ranks' are added up
        return F.linear(attention(layer, q, k, v, self._sinks), self._o, bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps, zero_centered=self._zero_centered)


class Passes(part.Passes):
    """Sends whole prompts through torch's kernels, and new tokens through Triton's on a GPU or else through torch's."""

    def __init__(self, kind: GroupedQuery, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._rope = kind, rope_table(kind, max_model_len, device).to(dtype)

    def prefill(self, cache: KVCache, *, slots: Sequence[int], lengths: Sequence[int]) -> Attention:
        return PrefillAttention(self._kind, cache, self._rope, slots=slots, lengths=lengths)

    def decode(self, cache: KVCache, *, slots: Tensor, positions: Tensor, blocks: Tensor, longest: int) -> Attention:
        if kernels.on(self._rope.device):
            from megarl.rollout.native.kernels.paged_attention import PagedAttention

            return PagedAttention(self._kind, cache, self._rope, slots=slots, positions=positions, blocks=blocks)
        return GatheredAttention(self._kind, cache, self._rope, slots=slots, positions=positions, longest=longest)


class PrefillAttention:
    """Attends over the first `lengths[i]` tokens of the sequence in `slots[i]`, one sequence after another.

    Args:
        rope: [max_model_len, 2, rotary_dim / 2], as of `rope_table`.
    """

    def __init__(
        self, kind: GroupedQuery, cache: KVCache, rope: Tensor, *, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._kind, self._cache, device = kind, cache, rope.device
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])
        self._longest = max(lengths)
        self._padded = (rows * self._longest + positions).to(device)
        self._slots, self._positions = torch.tensor(slots)[rows].to(device), positions.to(device)
        self._cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        self._cos_sin = rope[self._positions]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k = apply_rope(q, self._cos_sin), apply_rope(k, self._cos_sin)
        self._cache.write(layer, self._slots, self._positions, k, v)
        out = packed_attention(
            q,
            k,
            v,
            cu_seqlens=self._cu_seqlens,
            longest=self._longest,
            slots=self._padded,
            window=self._kind.sliding_window,
            scale=self._kind.softmax_scale,
            sinks=sinks,
        )
        return out.flatten(1)


class GatheredAttention:
    """Lets token i, the newest of the sequence in slots[i], attend to that sequence up to its own position.

    Gathers the blocks of every sequence, up to the longest's, then calls torch's attention. The queries that share a KV
    head are treated as so many query tokens of one head: they are at the same position, and grouped-query attention
    with a mask would otherwise copy the keys and values once per query head on CUDA.

    Args:
        rope: [max_model_len, 2, rotary_dim / 2], as of `rope_table`.
        slots, positions: int64 [T].
        longest: max(positions) + 1, which the caller knows without asking the device.
    """

    def __init__(
        self, kind: GroupedQuery, cache: KVCache, rope: Tensor, *, slots: Tensor, positions: Tensor, longest: int
    ) -> None:
        self._kind, self._cache, self._slots, self._positions = kind, cache, slots, positions
        self._cos_sin = rope[positions]
        self._blocks = blocks_for(longest)
        tokens = torch.arange(self._blocks * BLOCK_SIZE, device=rope.device)
        hidden = tokens > positions[:, None]
        if kind.sliding_window is not None:
            hidden |= tokens <= positions[:, None] - kind.sliding_window
        mask = torch.zeros(hidden.shape, dtype=rope.dtype, device=rope.device).masked_fill_(hidden, float("-inf"))
        self._mask = mask[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k = apply_rope(q, self._cos_sin), apply_rope(k, self._cos_sin)
        self._cache.write(layer, self._slots, self._positions, k, v)
        keys, values = self._cache.read(layer, self._slots, self._blocks)
        grouped, scale = q.unflatten(1, (k.shape[1], -1)), self._kind.softmax_scale
        if sinks is not None:
            seen, sinks = self._mask == 0, sinks.view(k.shape[1], -1, 1)
            return attend_with_sinks(grouped, keys, values, seen, sinks, scale).flatten(1)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale).flatten(1)

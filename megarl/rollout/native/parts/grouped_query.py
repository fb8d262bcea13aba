"""Computes grouped-query attention in the native engine: over whole prompts, and over new tokens of running sequences.

Its inputs are not yet rotated: q [T, heads, head_dim], k and v [T, kv_heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.rms_norm import norm_over_heads, rms_norm
from megarl.models.rope import apply_rope, rope_table
from megarl.rollout.native import kernels
from megarl.rollout.native.kv_cache import KVCache
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.part import Attention, Group
from megarl.rollout.native.parts.tokens import NewTokens, PrefillTokens

_QKV, _BIAS, _O = "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "self_attn.o_proj.weight"
_O_BIAS, _SINKS = "self_attn.o_proj.bias", "self_attn.sinks"
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class Weights(part.AttentionWeights):
    """Holds qkv [(heads + 2 kv_heads) * head_dim, hidden], o [hidden, heads * head_dim], of the heads on this rank."""

    def __init__(self, kind: GroupedQuery, weights: Mapping[str, Tensor], *, group: Group, eps: float) -> None:
        self._qkv, self._o = weights[_QKV], weights[_O]
        self._bias, self._q_norm, self._k_norm = (weights.get(name) for name in (_BIAS, *_NORMS))
        (self._heads, self._kv_heads), self._dim, self._eps = kind.heads(group.size), kind.head_dim, eps
        self._zero_centered, self._sinks = kind.zero_centered_norms, weights.get(_SINKS)
        self._o_bias, self._tp, self._gated = weights.get(_O_BIAS), group.size, kind.output_gate
        self._group, self._over_heads = group, kind.norm_over_heads
        if kind.norm_over_heads:  # all ranks have the weights of all heads
            firsts = zip(("q", "k"), kind.first_heads(group.size, group.rank), kind.heads(group.size), strict=True)
            self._channels = {at: slice(first * self._dim, (first + n) * self._dim) for at, first, n in firsts}

    @staticmethod
    def shapes(kind: GroupedQuery, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        (heads, kv_heads), dim = kind.heads(tp), kind.head_dim
        rows = ((2 if kind.output_gate else 1) * heads + 2 * kv_heads) * dim
        return {
            _QKV: (rows, hidden),
            **({_BIAS: (rows,)} if kind.qkv_bias else {}),
            **(
                {name: (width,) for name, width in zip(_NORMS, kind.norm_widths.values(), strict=True)}
                if kind.qk_norm
                else {}
            ),
            _O: (hidden, heads * dim),
            **({_O_BIAS: (hidden,)} if kind.output_bias else {}),
            **({_SINKS: (heads,)} if kind.sinks else {}),
        }

    def __call__(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        qkv = F.linear(x, self._qkv, self._bias).unflatten(1, (-1, self._dim))
        gates = self._heads if self._gated else 0
        q, gate, k, v = qkv.split((self._heads, gates, self._kv_heads, self._kv_heads), dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._norm(q, self._q_norm, "q"), self._norm(k, self._k_norm, "k")
        bias = None if self._o_bias is None else self._o_bias / self._tp  # all ranks' are added up
        out = attention(layer, q, k, v, self._sinks)
        return F.linear(out * gate.flatten(1).sigmoid() if self._gated else out, self._o, bias)

    def _norm(self, x: Tensor, weight: Tensor, of: str) -> Tensor:
        if self._over_heads:
            return norm_over_heads(x, weight[self._channels[of]], self._eps, self._group.mean_)
        return rms_norm(x, weight, self._eps, zero_centered=self._zero_centered)


class Passes(part.Passes):
    """Sends whole prompts through torch's kernels, and new tokens through Triton's on a GPU or else through torch's."""

    def __init__(self, kind: GroupedQuery, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._rope = kind, rope_table(kind, max_model_len, device).to(dtype)

    def prefill(self, cache: KVCache, *, slots: Sequence[int], lengths: Sequence[int], start: int = 0) -> Attention:
        return PrefillAttention(self._kind, PrefillTokens(cache, self._rope, slots=slots, lengths=lengths, start=start))

    def decode(self, cache: KVCache, *, slots: Tensor, positions: Tensor, blocks: Tensor, longest: int) -> Attention:
        if kernels.on(self._rope.device):
            from megarl.rollout.native.kernels.paged_attention import PagedAttention

            return PagedAttention(self._kind, cache, self._rope, slots=slots, positions=positions, blocks=blocks)
        return GatheredAttention(self._kind, cache, self._rope, slots=slots, positions=positions, longest=longest)


class PrefillAttention:
    """Attends from the tokens of prompts, each to those before it."""

    def __init__(self, kind: GroupedQuery, tokens: PrefillTokens) -> None:
        self._kind, self._tokens = kind, tokens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        kind, tokens = self._kind, self._tokens
        q, k = apply_rope(q, tokens.cos_sin), apply_rope(k, tokens.cos_sin)
        tokens.store(layer, k, v)
        k, v = tokens.seen(layer, k, v)
        return tokens.attend(q, k, v, window=kind.sliding_window, scale=kind.softmax_scale, sinks=sinks).flatten(1)


class GatheredAttention(NewTokens):
    """Attends from new tokens to their sequences."""

    def __init__(
        self, kind: GroupedQuery, cache: KVCache, rope: Tensor, *, slots: Tensor, positions: Tensor, longest: int
    ) -> None:
        super().__init__(cache, rope, slots=slots, positions=positions, longest=longest, window=kind.sliding_window)
        self._kind = kind

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k = apply_rope(q, self.cos_sin), apply_rope(k, self.cos_sin)
        self.store(layer, k, v)
        keys, values = self.gather(layer)
        return self.attend(q, keys, values, scale=self._kind.softmax_scale, sinks=sinks).flatten(1)

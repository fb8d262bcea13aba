"""Computes gated delta nets in the native engine: over whole prompts, and over new tokens of running sequences.

Its input is `heads` [T, key heads, width] of the in-projection, but for the output gates, see
`megarl.models.parts.gated_delta`. What it keeps of a sequence lies in the sequence's slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.delta_rule import (
    Heads,
    Packing,
    convolve,
    convolve_next,
    delta_rule,
    delta_step,
    gated_norm,
    projected,
)
from megarl.models.parts.gated_delta import GatedDelta
from megarl.parallel.upload import upload
from megarl.rollout.native import kernels
from megarl.rollout.native.kv_cache import KVCache
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.part import Attention, Group

_IN, _CONV, _DT_BIAS, _A_LOG, _NORM, _OUT = (
    f"linear_attn.{name}" for name in ("in_proj.weight", "conv1d", "dt_bias", "A_log", "norm", "out_proj.weight")
)


class Weights(part.AttentionWeights):
    """Holds the projections and the convolution of the heads on this rank, see `shapes`."""

    def __init__(self, kind: GatedDelta, weights: Mapping[str, Tensor], *, group: Group, eps: float) -> None:
        self._kind, self._heads, self._weights, self._eps = kind, kind.num_key_heads // group.size, weights, eps

    @staticmethod
    def shapes(kind: GatedDelta, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        keys, values = kind.num_key_heads // tp, kind.num_value_heads // tp
        return {
            _DT_BIAS: (values,),
            _A_LOG: (values,),
            _CONV: (keys * kind.conv_width, kind.conv_kernel),
            _IN: (keys * kind.width, hidden),
            _NORM: (kind.value_head_dim,),
            _OUT: (hidden, values * kind.value_head_dim),
        }

    def __call__(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        kind, weights = self._kind, self._weights
        heads = F.linear(x, weights[_IN]).unflatten(1, (self._heads, -1))
        channels, gate, scalars = projected(kind, heads)
        out = attention(layer, channels, scalars, weights[_CONV], weights[_A_LOG], weights[_DT_BIAS])
        return F.linear(gated_norm(out, gate.reshape(out.shape), weights[_NORM], self._eps).flatten(1), weights[_OUT])


class Passes(part.Passes):
    """Computes whole prompts chunk by chunk, and new tokens one by one, on a GPU by a kernel of Triton's."""

    def __init__(self, kind: GatedDelta, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._device = kind, device

    def prefill(self, cache: KVCache, *, slots: Sequence[int], lengths: Sequence[int], start: int = 0) -> Attention:
        assert start == 0, "such prompts are computed whole"
        packing = Packing.of(lengths, self._kind, self._device)
        return WholeSequences(self._kind, cache, packing, upload(torch.tensor(slots), self._device))

    def decode(self, cache: KVCache, *, slots: Tensor, positions: Tensor, blocks: Tensor, longest: int) -> Attention:
        return NextTokens(self._kind, cache, slots)


class WholeSequences:
    """Computes sequences from their beginning, and stores the states after them."""

    def __init__(self, kind: GatedDelta, cache: KVCache, packing: Packing, slots: Tensor) -> None:
        self._kind, self._cache, self._packing, self._slots = kind, cache, packing, slots

    def __call__(
        self, layer: int, channels: Tensor, scalars: Tensor, conv: Tensor, A_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        convolved, last = convolve(channels.flatten(1), conv, self._packing)
        heads = Heads.of(self._kind, convolved.view(channels.shape), scalars, A_log, dt_bias)
        out, states = delta_rule(heads, self._packing)
        of_conv, of_heads = self._cache.states[layer]
        of_conv[self._slots], of_heads[self._slots] = last.float(), states
        return out


class NextTokens:
    """Computes a token of each sequence, after the states that are in the cache."""

    def __init__(self, kind: GatedDelta, cache: KVCache, slots: Tensor) -> None:
        self._kind, self._cache, self._slots = kind, cache, slots

    def __call__(
        self, layer: int, channels: Tensor, scalars: Tensor, conv: Tensor, A_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        of_conv, of_heads = self._cache.states[layer]
        convolved, last = convolve_next(channels.flatten(1), conv, of_conv[self._slots])
        of_conv[self._slots] = last.float()
        heads = Heads.of(self._kind, convolved.view(channels.shape), scalars, A_log, dt_bias)
        if kernels.on(of_heads.device):
            from megarl.rollout.native.kernels import delta

            return delta.delta_step(heads, of_heads, self._slots)
        states = of_heads[self._slots]
        out = delta_step(heads, states)
        of_heads[self._slots] = states
        return out

"""Computes latent attention in the native engine: over whole prompts, and over new tokens of running sequences.

Its inputs are not yet rotated: q [T, heads, qk_head_dim] and, for all heads, latent [T, kv_lora_rank] and turned
[T, qk_rope_head_dim], which are cached. `up` [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank] makes the other
channels of keys, and values, of a latent: those of prompts. Decode steps absorb it into queries and outputs
(arXiv 2405.04434, section 2.1.2); what is cached then is keys and, but for their rotated channels, values of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.latent import Latent
from megarl.models.rope import apply_rope, pairs_apart, rope_table
from megarl.rollout.native import kernels
from megarl.rollout.native.kv_cache import KVCache
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.part import Attention, Group
from megarl.rollout.native.parts.tokens import NewTokens, Places, PrefillTokens

_Q, _Q_A, _Q_NORM, _Q_B, _KV_A, _KV_NORM, _KV_B, _O = (
    f"self_attn.{name}.weight"
    for name in (
        "q_proj",
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    )
)


class Weights(part.AttentionWeights):
    """Holds projections to narrow vectors, whole, and those to and from the heads of this rank, see `shapes`."""

    def __init__(self, kind: Latent, weights: Mapping[str, Tensor], *, group: Group, eps: float) -> None:
        self._kind, self._heads, self._weights = kind, kind.num_attention_heads // group.size, weights

    @staticmethod
    def shapes(kind: Latent, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        heads, narrow = kind.num_attention_heads // tp, kind.q_lora_rank
        queries = heads * kind.qk_head_dim
        return {
            **({} if narrow else {_Q: (queries, hidden)}),
            **({_Q_A: (narrow, hidden), _Q_NORM: (narrow,), _Q_B: (queries, narrow)} if narrow else {}),
            _KV_A: (kind.cached_dim, hidden),
            _KV_NORM: (kind.kv_lora_rank,),
            _KV_B: (heads * (kind.qk_nope_head_dim + kind.v_head_dim), kind.kv_lora_rank),
            _O: (hidden, heads * kind.v_head_dim),
        }

    def __call__(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        kind, weights = self._kind, self._weights
        if kind.q_lora_rank:
            q = F.linear(self._norm(F.linear(x, weights[_Q_A]), weights[_Q_NORM]), weights[_Q_B])
        else:
            q = F.linear(x, weights[_Q])
        latent, turned = F.linear(x, weights[_KV_A]).split((kind.kv_lora_rank, kind.qk_rope_head_dim), dim=-1)
        latent = self._norm(latent, weights[_KV_NORM])
        up = weights[_KV_B].unflatten(0, (self._heads, -1))
        return F.linear(attention(layer, q.unflatten(1, (self._heads, -1)), latent, turned, up), weights[_O])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._kind.latent_norm_eps)


class Passes(part.Passes):
    """Sends whole prompts through torch's kernels, and new tokens through Triton's on a GPU or else through torch's."""

    def __init__(self, kind: Latent, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._rope = kind, rope_table(kind, max_model_len, device).to(dtype)

    def prefill(self, cache: KVCache, *, slots: Sequence[int], lengths: Sequence[int], start: int = 0) -> Attention:
        return PrefillAttention(self._kind, PrefillTokens(cache, self._rope, slots=slots, lengths=lengths, start=start))

    def decode(self, cache: KVCache, *, slots: Tensor, positions: Tensor, blocks: Tensor, longest: int) -> Attention:
        if kernels.on(self._rope.device):
            places = Places(cache, self._rope, slots=slots, positions=positions)
            return AbsorbedAttention(self._kind, places, partial(_attend_in_place, self._kind, places))
        tokens = NewTokens(cache, self._rope, slots=slots, positions=positions, longest=longest)
        return AbsorbedAttention(self._kind, tokens, partial(_attend_gathered, self._kind, tokens))


class PrefillAttention:
    """Attends from the tokens of prompts, each to those before it, with keys and values of every head."""

    def __init__(self, kind: Latent, tokens: PrefillTokens) -> None:
        self._kind, self._tokens = kind, tokens

    def __call__(self, layer: int, q: Tensor, latent: Tensor, turned: Tensor, up: Tensor) -> Tensor:
        kind = self._kind
        q_still, q_turned, kept = _rotate_and_store(kind, self._tokens, layer, q, latent, turned)
        (kept,) = self._tokens.seen(layer, kept)
        latent, turned = kept.split((kind.kv_lora_rank, kind.qk_rope_head_dim), dim=-1)
        k_and_v = F.linear(latent.squeeze(1), up.flatten(0, 1)).unflatten(1, (len(up), -1))
        k_still, v = k_and_v.split((kind.qk_nope_head_dim, kind.v_head_dim), dim=-1)
        q = torch.cat((q_still, q_turned), dim=-1)
        k = torch.cat((k_still, turned.expand(-1, len(up), -1)), dim=-1)
        return self._tokens.attend(q, k, v, scale=kind.softmax_scale).flatten(1)


class AbsorbedAttention:
    """Attends from new tokens to the latents of their sequences.

    Args:
        attend: (layer, q [T, heads, cached_dim]) -> [T, heads, kv_lora_rank].
    """

    def __init__(self, kind: Latent, tokens: Places, attend: Callable[[int, Tensor], Tensor]) -> None:
        self._kind, self._tokens, self._attend = kind, tokens, attend

    def __call__(self, layer: int, q: Tensor, latent: Tensor, turned: Tensor, up: Tensor) -> Tensor:
        kind = self._kind
        up_to_k, up_to_v = up.split((kind.qk_nope_head_dim, kind.v_head_dim), dim=1)
        q_still, q_turned, _ = _rotate_and_store(kind, self._tokens, layer, q, latent, turned)
        q = torch.cat((torch.einsum("thd,hdr->thr", q_still, up_to_k), q_turned), dim=-1)
        return torch.einsum("thr,hdr->thd", self._attend(layer, q), up_to_v).flatten(1)


def _attend_gathered(kind: Latent, tokens: NewTokens, layer: int, q: Tensor) -> Tensor:
    """Read the latents of all sequences up to the longest's."""
    (keys,) = tokens.gather(layer)
    return tokens.attend(q, keys, keys[..., : kind.kv_lora_rank], scale=kind.softmax_scale)


def _attend_in_place(kind: Latent, tokens: Places, layer: int, q: Tensor) -> Tensor:
    """Read the latents where they lie."""
    from megarl.rollout.native.kernels.paged_attention import attend

    (keys,), tables = tokens.cache.layers[layer], tokens.cache.tables
    sizes: Any = dict(value_dim=kind.kv_lora_rank, scale=kind.softmax_scale)
    return attend(q, keys, None, tables=tables, slots=tokens.slots, positions=tokens.positions, **sizes)


def _rotate_and_store(
    kind: Latent, tokens: PrefillTokens | Places, layer: int, q: Tensor, latent: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate, and put the latents with the rotated channels of the keys into the cache.

    Returns: the queries' channels that are not rotated, those that are, and what is kept, [T, 1, cached_dim].
    """
    q_still, q_turned = q.split((kind.qk_nope_head_dim, kind.qk_rope_head_dim), dim=-1)
    q_turned, turned = (apply_rope(pairs_apart(x), tokens.cos_sin) for x in (q_turned, turned.unsqueeze(1)))
    kept = torch.cat((latent.unsqueeze(1), turned), dim=-1)
    tokens.store(layer, kept)
    return q_still, q_turned, kept

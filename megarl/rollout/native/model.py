"""The decoder that generates: tensor-parallel, its weights named and laid out as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.placements import heads_on_rank
from megarl.models.tensors import EMBEDDING, FINAL_NORM, OUTPUT, layer_name
from megarl.rollout.native.attention import Attention
from megarl.rollout.native.fused import add_and_norm
from megarl.rollout.native.mlp import MLP, mlp_of, mlp_shapes


def parameter_shapes(arch: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one tensor-parallel rank's parameters by name, the vocabulary padded; the same on every rank."""
    groups, queries = (hi - lo for lo, hi in heads_on_rank(arch, tp, 0))
    dim, hidden = arch.head_dim, arch.hidden_size
    heads = groups * queries
    qkv = (heads + 2 * groups) * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.qkv_proj.weight": (qkv, hidden),
        **({"self_attn.qkv_proj.bias": (qkv,)} if arch.qkv_bias else {}),
        **({"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)} if arch.qk_norm else {}),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "post_attention_layernorm.weight": (hidden,),
        **mlp_shapes(arch, tp),
    }
    vocab = (arch.padded_vocab_size(tp) // tp, hidden)
    return {
        EMBEDDING: vocab,
        **{layer_name(i, leaf): shape for i in range(arch.num_layers) for leaf, shape in layer.items()},
        FINAL_NORM: (hidden,),
        **({} if arch.tied else {OUTPUT: vocab}),
    }


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The parameters of a layer on this rank; shapes as in `parameter_shapes`."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_attention_norm: Tensor
    mlp: MLP

    @staticmethod
    def of(arch: Architecture, params: Mapping[str, Tensor], layer: int) -> LayerWeights:
        def get(leaf: str) -> Tensor | None:
            return params.get(layer_name(layer, leaf))

        def need(leaf: str) -> Tensor:
            return params[layer_name(layer, leaf)]

        return LayerWeights(
            input_norm=need("input_layernorm.weight"),
            qkv=need("self_attn.qkv_proj.weight"),
            qkv_bias=get("self_attn.qkv_proj.bias"),
            q_norm=get("self_attn.q_norm.weight"),
            k_norm=get("self_attn.k_norm.weight"),
            o=need("self_attn.o_proj.weight"),
            post_attention_norm=need("post_attention_layernorm.weight"),
            mlp=mlp_of(arch, params, layer),
        )


class Decoder:
    """The forward pass over flat tokens. Prefill and decode differ only in the attention they pass in.

    Args:
        params: this rank's parameters, named and shaped as in `parameter_shapes`.
        tp_group: the replica's ranks; None is one rank alone.
    """

    def __init__(self, arch: Architecture, params: Mapping[str, Tensor], *, tp_group: dist.ProcessGroup | None) -> None:
        self._arch, self._group = arch, tp_group
        self._tp = 1 if tp_group is None else tp_group.size()
        self._embedding, self._final_norm = params[EMBEDDING], params[FINAL_NORM]
        self._output = params[EMBEDDING if arch.tied else OUTPUT]
        self._layers = [LayerWeights.of(arch, params, i) for i in range(arch.num_layers)]
        self._first_token = 0 if tp_group is None else tp_group.rank() * len(self._embedding)
        self._kv_heads, queries = (hi - lo for lo, hi in heads_on_rank(arch, self._tp, 0))
        self._heads = self._kv_heads * queries

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """int64 [T] -> the output of the final norm [T, hidden]. The attention knows the tokens' positions."""
        eps = self._arch.norm_eps
        norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        total = self._embed(tokens)
        x = self._norm(total, self._layers[0].input_norm)
        for i, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = self._sum_over_ranks(F.linear(attention(i, *self._qkv(layer, x)), layer.o))
            total, x = add_and_norm(total, attended, layer.post_attention_norm, eps)
            total, x = add_and_norm(total, self._sum_over_ranks(layer.mlp(x)), next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden] from `forward` -> [B, vocab_size], bit for bit the same on every rank.

        Each column is computed by one rank and gathered, so all ranks draw the same tokens from the logits.
        """
        local = F.linear(hidden, self._output)
        if self._group is None:
            return local
        shards = [torch.empty_like(local) for _ in range(self._tp)]
        dist.all_gather(shards, local, group=self._group)
        return torch.cat(shards, dim=-1)[:, : self._arch.vocab_size]

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._group is None:
            return F.embedding(tokens, self._embedding)
        local = tokens - self._first_token
        elsewhere = (local < 0) | (local >= len(self._embedding))
        x = F.embedding(local.masked_fill_(elsewhere, 0), self._embedding)
        # Not a product with the mask: row 0 of a rank that holds only padding may be anything, and 0 x NaN is NaN.
        return self._sum_over_ranks(x.masked_fill_(elsewhere[:, None], 0))

    def _qkv(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim], not yet rotated."""
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(1, (-1, self._arch.head_dim))
        q, k, v = qkv.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return q, k, v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._arch.norm_eps)

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(x, group=self._group)
        return x

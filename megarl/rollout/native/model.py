"""Runs the decoder that generates: tensor-parallel, its weights named and laid out as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.rms_norm import rms_norm
from megarl.models.weights import EMBEDDING, FINAL_NORM, INPUT_NORM, OUTPUT, OUTPUT_NORMS, layer_prefix, mlp_norm
from megarl.parallel.experts import TensorSplit
from megarl.rollout.native.fused import add_and_norm
from megarl.rollout.native.parts import module_of
from megarl.rollout.native.parts.part import Attention, AttentionWeights, Group, MLPWeights


def parameter_shapes(arch: Architecture, split: TensorSplit) -> dict[str, tuple[int, ...]]:
    """Give the shapes of a tensor-parallel rank's parameters by name, the vocabulary padded; equal on every rank."""
    hidden = arch.hidden_size
    vocab = (arch.padded_vocab_size(split.tp) // split.tp, hidden)
    return {
        EMBEDDING: vocab,
        **{
            layer_prefix(i) + leaf: shape
            for i in range(arch.num_layers)
            for leaf, shape in _layer(arch, i, split).items()
        },
        FINAL_NORM: (hidden,),
        **({} if arch.tied else {OUTPUT: vocab}),
    }


def _layer(arch: Architecture, number: int, split: TensorSplit) -> dict[str, tuple[int, ...]]:
    layer, hidden = arch.layer(number), arch.hidden_size
    return {
        **(dict.fromkeys((INPUT_NORM, mlp_norm(layer)), (hidden,)) if layer.input_norms else {}),
        **module_of(layer.attention).Weights.shapes(layer.attention, hidden, split.tp),
        **module_of(layer.mlp).Weights.shapes(layer.mlp, hidden, split),
        **(dict.fromkeys(OUTPUT_NORMS, (hidden,)) if layer.output_norms else {}),
    }


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Holds the parameters of a layer on this rank; not every layer has norms before its parts, nor behind them."""

    input_norm: Tensor | None
    attention: AttentionWeights
    attention_output_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: MLPWeights
    mlp_output_norm: Tensor | None

    @staticmethod
    def of(
        arch: Architecture, params: Mapping[str, Tensor], number: int, group: Group, split: TensorSplit
    ) -> LayerWeights:
        """Take a layer's parameters, named and shaped as in `parameter_shapes`."""
        layer, prefix = arch.layer(number), layer_prefix(number)
        weights = {leaf: params[prefix + leaf] for leaf in _layer(arch, number, split)}
        attention, mlp = module_of(layer.attention).Weights, module_of(layer.mlp).Weights
        return LayerWeights(
            input_norm=weights.get(INPUT_NORM),
            attention=attention(layer.attention, weights, group=group, eps=arch.norm_eps),
            attention_output_norm=weights[OUTPUT_NORMS[0]] if layer.output_norms else None,
            mlp_norm=weights.get(mlp_norm(layer)) if layer.input_norms else None,
            mlp=mlp(layer.mlp, weights, experts=split.expert_place(group.rank)),
            mlp_output_norm=weights[OUTPUT_NORMS[1]] if layer.output_norms else None,
        )


class Decoder:
    """Runs forward passes over flat tokens. Prefill and decode differ only in the attention that they pass in.

    Args:
        params: this rank's parameters, named and shaped as in `parameter_shapes`.
        tp_group: the replica's ranks; None: a single rank.
        split: how these divide layers.
    """

    def __init__(
        self,
        arch: Architecture,
        params: Mapping[str, Tensor],
        *,
        tp_group: dist.ProcessGroup | None,
        split: TensorSplit,
    ) -> None:
        self._arch, self._group = arch, Group(tp_group)
        self._embedding, self._final_norm = params[EMBEDDING], params[FINAL_NORM]
        self._output = params[EMBEDDING if arch.tied else OUTPUT]
        self._layers = [LayerWeights.of(arch, params, i, self._group, split) for i in range(arch.num_layers)]
        self._scale = torch.tensor(arch.embedding_scale, dtype=self._embedding.dtype).item()
        self._first_token = self._group.rank * len(self._embedding)

    def forward(self, tokens: Tensor, attention: Attention, routed: list[Tensor] | None = None) -> Tensor:
        """Compute the output of the final norm: int64 [T] -> [T, hidden]. The attention knows the tokens' positions.

        Args:
            routed: gets the tokens' experts of one layer after the other, int16 [T, experts_per_token] each.
        """
        norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        total = self._embed(tokens)
        first = self._layers[0].input_norm
        x = total if first is None else self._norm(total, first)
        for i, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = self._group.sum_(layer.attention(x, i, attention))
            if layer.attention_output_norm is not None:
                attended = self._norm(attended, layer.attention_output_norm)
            total, x = self._add_and_norm(total, attended, layer.mlp_norm)
            computed = self._group.sum_(layer.mlp(x, routed))
            if layer.mlp_output_norm is not None:
                computed = self._norm(computed, layer.mlp_output_norm)
            total, x = self._add_and_norm(total, computed, next_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute [B, hidden] from `forward` -> [B, vocab_size], bit for bit the same on every rank.

        One rank computes each column for all, so all ranks draw the same tokens from the logits.
        """
        local = F.linear(hidden, self._output)
        if self._group.ranks is None:
            return local
        shards = [torch.empty_like(local) for _ in range(self._group.size)]
        dist.all_gather(shards, local, group=self._group.ranks)
        return torch.cat(shards, dim=-1)[:, : self._arch.vocab_size]

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded = self._look_up(tokens)
        return embedded if self._scale == 1 else embedded * self._scale

    def _look_up(self, tokens: Tensor) -> Tensor:
        if self._group.ranks is None:
            return F.embedding(tokens, self._embedding)
        local = tokens - self._first_token
        elsewhere = (local < 0) | (local >= len(self._embedding))
        x = F.embedding(local.masked_fill_(elsewhere, 0), self._embedding)
        # Not a product with the mask: row 0 of a rank that holds only padding may be anything, and 0 x NaN is NaN.
        return self._group.sum_(x.masked_fill_(elsewhere[:, None], 0))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._arch.norm_eps, zero_centered=self._arch.zero_centered_norms)

    def _add_and_norm(self, residual: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute residual + x, and what the next part reads: its norm, or itself."""
        if weight is None:
            total = residual + x
            return total, total
        return add_and_norm(residual, x, weight, self._arch.norm_eps, zero_centered=self._arch.zero_centered_norms)

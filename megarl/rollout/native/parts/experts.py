"""Computes a mixture of experts in the native engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.experts import STACKED, Experts
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.swiglu import gated


class Weights(part.MLPWeights):
    """Sends every token through its most probable experts, and returns their weighted sum.

    The router [experts, hidden] is the same on every rank, and so is its choice; gate_up [experts, 2 * ffn / tp,
    hidden] and down [experts, hidden, ffn / tp] are split like one MLP.
    """

    def __init__(self, kind: Experts, weights: Mapping[str, Tensor], *, tp: int, eps: float) -> None:
        self._moe = kind.moe
        self._router, self._gate_up, self._down = (weights[name] for name in self.shapes(kind, 1, 1))

    @staticmethod
    def shapes(kind: Experts, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        ffn, count, module = kind.ffn_hidden_size // tp, kind.moe.num_experts, kind.moe.module
        gate_up, down = STACKED
        return {
            kind.router: (count, hidden),
            f"{module}.{gate_up}": (count, 2 * ffn, hidden),
            f"{module}.{down}": (count, hidden, ffn),
        }

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        pairs = chosen.flatten().bincount(minlength=self._moe.num_experts).tolist()
        inputs = x[order // self._moe.experts_per_token].split(pairs)
        outputs = x.new_empty(len(order), x.shape[1])
        outputs[order] = torch.cat(
            [gated(part, self._gate_up[i], self._down[i]) for i, part in enumerate(inputs) if len(part)]
        )
        # Not index_add: on a GPU that would add a token's experts in any order, and round each time differently.
        return (outputs.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: their weights, float32, and numbers, both [T, experts_per_token]."""
        probabilities = F.linear(x.float(), self._router.float()).softmax(-1)
        weights, chosen = probabilities.topk(self._moe.experts_per_token, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self._moe.norm_topk_prob else weights), chosen

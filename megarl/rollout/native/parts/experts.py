"""Computes a mixture of experts in the native engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.models.parts.experts import Experts
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.part import Group
from megarl.rollout.native.parts.router import choose
from megarl.rollout.native.parts.swiglu import gated


class Weights(part.MLPWeights):
    """Sends every token through its best experts, and returns their weighted sum, with what a shared MLP adds.

    The router [experts, hidden] is the same on every rank, and so is its choice; gate_up [experts, 2 * ffn / tp,
    hidden] and down [experts, hidden, ffn / tp] are split like one MLP, and so is the shared one.
    """

    def __init__(self, kind: Experts, weights: Mapping[str, Tensor], *, group: Group, eps: float) -> None:
        self._moe = kind.moe
        gate_up, down = kind.stacked_in_engine
        self._router = weights[kind.moe.weight]
        self._bias, self._added = weights.get(kind.moe.bias), weights.get(kind.moe.added_to_logits)
        self._gate_up, self._down = weights[gate_up], weights[down]
        self._shared = [weights[name] for name in kind.shared_in_engine if kind.shared_ffn_hidden_size]

    @staticmethod
    def shapes(kind: Experts, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        ffn, count, moe = kind.ffn_hidden_size // tp, kind.moe.num_experts, kind.moe
        (gate_up, down), shared = kind.stacked_in_engine, kind.shared_ffn_hidden_size // tp
        shapes = ((2 * shared, hidden), (hidden, shared))
        return {
            moe.weight: (count, hidden),
            **({moe.bias: (count,)} if moe.correction_bias else {}),
            **({moe.added_to_logits: (count,)} if moe.logit_bias else {}),
            gate_up: (count, 2 * ffn, hidden),
            down: (count, hidden, ffn),
            **(dict(zip(kind.shared_in_engine, shapes, strict=True)) if shared else {}),
        }

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = choose(self._moe, x, self._router, self._bias, self._added)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        pairs = chosen.flatten().bincount(minlength=self._moe.num_experts).tolist()
        inputs = x[order // self._moe.experts_per_token].split(pairs)
        outputs = x.new_empty(len(order), x.shape[1])
        outputs[order] = torch.cat([self._expert(i, part) for i, part in enumerate(inputs) if len(part)])
        # Not index_add: on a GPU that would add a token's experts in any order, and round each time differently.
        routed = (outputs.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        if not self._shared:
            return routed
        gate_up, down = self._shared
        return routed + gated(x, gate_up, down)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        """Send tokens through an expert: [T, hidden] -> [T, hidden]."""
        return gated(x, self._gate_up[number], self._down[number])

"""Computes a mixture of experts in the native engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.experts import Experts
from megarl.parallel.experts import ExpertPlace, TensorSplit
from megarl.rollout.native import kernels
from megarl.rollout.native.parts import part
from megarl.rollout.native.parts.router import choose
from megarl.rollout.native.parts.swiglu import gated


class Weights(part.MLPWeights):
    """Sends every token through its best experts, and returns their weighted sum, with what a shared MLP adds.

    The router [experts, hidden] is the same on every rank, and so is its choice; gate_up [experts, 2 * ffn / tp,
    hidden] and down [experts, hidden, ffn / tp] are split like one MLP, and so is the shared one. With expert
    parallelism a rank has whole experts, and adds nothing to a token for those of other ranks: the sum is the same.
    """

    def __init__(self, kind: Experts, weights: Mapping[str, Tensor], *, experts: ExpertPlace) -> None:
        self._moe, self._own = kind.moe, experts.own(kind.moe.num_experts)
        gate_up, down = kind.stacked_in_engine
        self._router = weights[kind.moe.weight]
        self._bias, self._added = weights.get(kind.moe.bias), weights.get(kind.moe.added_to_logits)
        self._gate_up, self._down = weights[gate_up], weights[down]
        self._shared = [weights[name] for name in kind.shared_in_engine if kind.shared_ffn_hidden_size]
        self._shared_gate = weights.get(kind.shared_gate_weight)

    @staticmethod
    def shapes(kind: Experts, hidden: int, split: TensorSplit) -> dict[str, tuple[int, ...]]:
        ffn, count, moe = kind.ffn_hidden_size // split.expert_tp, kind.moe.num_experts, kind.moe
        (gate_up, down), shared = kind.stacked_in_engine, kind.shared_ffn_hidden_size // split.tp
        count_here = len(split.expert_parts(count)[0])
        shapes = ((2 * shared, hidden), (hidden, shared))
        return {
            moe.weight: (count, hidden),
            **({moe.bias: (count,)} if moe.correction_bias else {}),
            **({moe.added_to_logits: (count,)} if moe.logit_bias else {}),
            gate_up: (count_here, 2 * ffn, hidden),
            down: (count_here, hidden, ffn),
            **(dict(zip(kind.shared_in_engine, shapes, strict=True)) if shared else {}),
            **({kind.shared_gate_weight: (1, hidden)} if kind.shared_gate else {}),
        }

    def __call__(self, x: Tensor, routed: list[Tensor] | None = None) -> Tensor:
        weights, chosen = choose(self._moe, x, self._router, self._bias, self._added)
        if routed is not None:
            routed.append(chosen.to(torch.int16))  # of a long prompt all layers are kept
        total = self._computed(x, weights, chosen)
        if not self._shared:
            return total
        gate_up, down = self._shared
        shared = gated(x, gate_up, down)
        return total + (shared if self._shared_gate is None else F.linear(x, self._shared_gate).sigmoid() * shared)

    def _computed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Add up what this rank's experts make of the tokens that chose them: [T, hidden] -> [T, hidden]."""
        if kernels.on(x.device):
            from megarl.rollout.native.kernels.experts import mixture

            kind = dict(first=self._own.start, num_experts=self._moe.num_experts, **self._glu())
            return mixture(x, weights, chosen, self._gate_up, self._down, **kind)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        counts = chosen.flatten().bincount(minlength=self._moe.num_experts).tolist()
        pairs = order.split(counts)[self._own.start : self._own.stop]
        outputs = x.new_zeros(len(order), x.shape[1])
        own = torch.cat(pairs)
        inputs = x[own // self._moe.experts_per_token].split([len(some) for some in pairs])
        computed = [self._expert(i, tokens) for i, tokens in enumerate(inputs) if len(tokens)]
        if computed:
            outputs[own] = torch.cat(computed)
        # Not index_add: on a GPU that would add a token's experts in any order, and round each time differently.
        return (outputs.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _glu(self) -> dict[str, Any]:
        """Describe the experts' activation to the kernel, if it is not silu."""
        return {}

    def _expert(self, number: int, x: Tensor) -> Tensor:
        """Send tokens through one of the rank's experts: [T, hidden] -> [T, hidden]."""
        return gated(x, self._gate_up[number], self._down[number])

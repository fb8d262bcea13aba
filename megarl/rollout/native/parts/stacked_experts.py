"""Computes gpt-oss' experts in the native engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megarl.models.activations import quick_gelu
from megarl.models.parts.stacked_experts import StackedExperts
from megarl.rollout.native.parts import experts
from megarl.rollout.native.parts.part import Group


class Weights(experts.Weights):
    """Holds biases beside the matrices: of gate and up [experts, 2 * ffn / tp], of down [experts, hidden]."""

    def __init__(self, kind: StackedExperts, weights: Mapping[str, Tensor], *, group: Group, eps: float) -> None:
        super().__init__(kind, weights, group=group, eps=eps)
        _, gate_up, _, down = kind.all_in_engine
        self._gate_up_bias, self._down_bias = weights[gate_up], weights[down]
        self._limit, self._tp = kind.limit, group.size

    @staticmethod
    def shapes(kind: Any, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        count, (_, gate_up, _, down) = kind.moe.num_experts, kind.all_in_engine
        biases = {gate_up: (count, 2 * kind.ffn_hidden_size // tp), down: (count, hidden)}
        return experts.Weights.shapes(kind, hidden, tp) | biases

    def _expert(self, number: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self._gate_up[number], self._gate_up_bias[number]).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        bias = self._down_bias[number] / self._tp  # all ranks' are added up
        return F.linear(quick_gelu(gate) * (up + 1), self._down[number], bias)

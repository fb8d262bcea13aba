"""Computes gpt-oss' experts in the native engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megarl.models.activations import quick_gelu
from megarl.models.parts.stacked_experts import StackedExperts
from megarl.parallel.experts import ExpertPlace, TensorSplit
from megarl.rollout.native.parts import experts as mixture


class Weights(mixture.Weights):
    """Holds biases beside the matrices: of gate and up [experts, 2 * ffn / tp], of down [experts, hidden]."""

    def __init__(self, kind: StackedExperts, weights: Mapping[str, Tensor], *, experts: ExpertPlace) -> None:
        super().__init__(kind, weights, experts=experts)
        _, gate_up, _, down = kind.all_in_engine
        self._gate_up_bias, self._down_bias = weights[gate_up], weights[down]
        self._limit, self._tp = kind.limit, experts.tp

    @staticmethod
    def shapes(kind: Any, hidden: int, split: TensorSplit) -> dict[str, tuple[int, ...]]:
        shapes = mixture.Weights.shapes(kind, hidden, split)
        gate_up, gate_up_bias, down, down_bias = kind.all_in_engine
        return shapes | {gate_up_bias: shapes[gate_up][:2], down_bias: shapes[down][:2]}

    def _glu(self) -> dict[str, Any]:
        from megarl.rollout.native.kernels.experts import ClampedGLU

        biases = self._gate_up_bias, self._down_bias
        return dict(clamped=ClampedGLU(*biases, limit=self._limit, share=1 / self._tp))

    def _expert(self, number: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self._gate_up[number], self._gate_up_bias[number]).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        bias = self._down_bias[number] / self._tp  # those of all ranks that share the expert are added up
        return F.linear(quick_gelu(gate) * (up + 1), self._down[number], bias)

"""Computes a gated MLP in the native engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.swiglu import SwiGLU
from megarl.parallel.experts import ExpertPlace, TensorSplit
from megarl.rollout.native.fused import activate_and_mul
from megarl.rollout.native.parts import part


class Weights(part.MLPWeights):
    """Holds gate_up [2 * ffn / tp, hidden], down [hidden, ffn / tp]."""

    def __init__(self, kind: SwiGLU, weights: Mapping[str, Tensor], *, experts: ExpertPlace) -> None:
        self._gate_up, self._down = weights["mlp.gate_up_proj.weight"], weights["mlp.down_proj.weight"]
        self._activation = kind.activation

    @staticmethod
    def shapes(kind: SwiGLU, hidden: int, split: TensorSplit) -> dict[str, tuple[int, ...]]:
        ffn = kind.ffn_hidden_size // split.tp
        return {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}

    def __call__(self, x: Tensor, routed: list[Tensor] | None = None) -> Tensor:
        return gated(x, self._gate_up, self._down, self._activation)


def gated(x: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu") -> Tensor:
    """Compute a gated MLP: x [T, hidden], gate_up [2 * ffn, hidden], down [hidden, ffn]."""
    return F.linear(activate_and_mul(F.linear(x, gate_up), activation), down)

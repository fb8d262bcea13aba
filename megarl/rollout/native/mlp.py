"""The MLP of a layer of the native engine: one, or experts behind a router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.architecture import Architecture, MixtureOfExperts
from megarl.models.placements import STACKED_DOWN, STACKED_GATE_UP
from megarl.models.tensors import layer_name, router_leaf
from megarl.rollout.native.fused import silu_and_mul


class MLP(Protocol):
    """The part of a layer that works on each token by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], to be summed over the tensor-parallel ranks."""
        ...


def mlp_shapes(arch: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one tensor-parallel rank's parameters of a layer's MLP, by name within the layer."""
    hidden, ffn, moe = arch.hidden_size, arch.ffn_hidden_size // tp, arch.moe
    if moe is None:
        return {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    return {
        router_leaf(moe): (moe.num_experts, hidden),
        f"{moe.module}.{STACKED_GATE_UP}": (moe.num_experts, 2 * ffn, hidden),
        f"{moe.module}.{STACKED_DOWN}": (moe.num_experts, hidden, ffn),
    }


def mlp_of(arch: Architecture, params: Mapping[str, Tensor], layer: int) -> MLP:
    """A layer's MLP over this rank's parameters."""
    weights = [params[layer_name(layer, leaf)] for leaf in mlp_shapes(arch, tp=1)]
    return SwiGLU(*weights) if arch.moe is None else Experts(arch.moe, *weights)


@dataclass(frozen=True)
class SwiGLU:
    """A gated MLP: gate_up [2 * ffn / tp, hidden], down [hidden, ffn / tp]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(silu_and_mul(F.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True)
class Experts:
    """Every token goes through the most probable experts and takes their weighted sum.

    The router [experts, hidden] is the same on every rank, hence so is its choice; gate_up [experts, 2 * ffn / tp,
    hidden] and down [experts, hidden, ffn / tp] are split like one MLP.
    """

    moe: MixtureOfExperts
    router: Tensor
    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        pairs = chosen.flatten().bincount(minlength=self.moe.num_experts).tolist()
        inputs = x[order // self.moe.experts_per_token].split(pairs)
        outputs = x.new_empty(len(order), x.shape[1])
        outputs[order] = torch.cat(
            [SwiGLU(self.gate_up[i], self.down[i])(part) for i, part in enumerate(inputs) if len(part)]
        )
        # Not index_add: on a GPU that would add a token's experts in any order, and round each time differently.
        return (outputs.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and numbers of each token's experts, both [T, experts_per_token]."""
        probabilities = F.linear(x.float(), self.router.float()).softmax(-1)
        weights, chosen = probabilities.topk(self.moe.experts_per_token, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.moe.norm_topk_prob else weights), chosen

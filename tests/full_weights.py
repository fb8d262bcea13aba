"""Whole models for tests: random weights by Hugging Face name, and an engine's parameters filled from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.fill import Source, as_logical
from megarl.models.tensors import LogicalTensor
from megarl.models.weights import engine_placements, logical_tensors
from megarl.parallel.experts import TensorSplit


def random_weights(arch: Architecture, seed: int) -> dict[str, Tensor]:
    """float32, the same for the same seed on every rank; large enough that greedy choices are no near-ties."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for t in logical_tensors(arch).values():
        noise = torch.randn(t.hf_shape, generator=generator)
        weights[t.name] = 1 + 0.1 * noise if t.kind == "norm" else 0.15 * noise
    return weights


def source_of(weights: Mapping[str, Tensor]) -> Source:
    """Boxes of logical tensors from weights by Hugging Face name."""
    return lambda tensor, box: logical(tensor, weights[tensor.name])[tuple(slice(*i) for i in box)]


def logical(tensor: LogicalTensor, in_file: Tensor) -> Tensor:
    """A whole Hugging Face tensor, its axes taken apart and in their logical order."""
    return as_logical(tensor, in_file.view(tensor.in_file().shape))


def fill_engine(
    params: Mapping[str, Tensor], arch: Architecture, full: Mapping[str, Tensor], tp: int, r: int, ep: int = 1
) -> None:
    """Write the part that tensor-parallel rank `r` of `tp` holds; whatever no placement covers becomes NaN."""
    for p in params.values():
        p.fill_(torch.nan)
    tensors = logical_tensors(arch)
    for at in engine_placements(arch, TensorSplit(tp=tp, ep=ep), r):
        box = logical(tensors[at.tensor], full[at.tensor])[tuple(slice(*x) for x in at.box)]
        held = params[at.param][slice(*at.rows)].view(at.view)
        held[tuple(slice(*x) for x in at.within)] = box.to(held)

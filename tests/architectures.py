"""Architectures whose layers are all alike, from one list of attributes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.parts.experts import Experts, MixtureOfExperts
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.swiglu import SwiGLU


def alike(*, num_layers: int, ffn_hidden_size: int, moe: MixtureOfExperts | None = None, **rest: Any) -> Architecture:
    """A model of grouped-query layers, with an MLP each or, with `moe`, experts of that width."""
    attention = {f.name: rest.pop(f.name) for f in fields(GroupedQuery) if f.name in rest}
    mlp = Experts(ffn_hidden_size=ffn_hidden_size, moe=moe) if moe else SwiGLU(ffn_hidden_size=ffn_hidden_size)
    return Architecture(layers=((Layer(attention=GroupedQuery(**attention), mlp=mlp), num_layers),), **rest)


def changed(arch: Architecture, **changes: Any) -> Architecture:
    """Another architecture with some attributes of the model, or of its layers, changed."""
    ((layer, num_layers),) = arch.layers
    rest = {f.name: getattr(arch, f.name) for f in fields(arch) if f.name != "layers"}
    attention = {f.name: getattr(layer.attention, f.name) for f in fields(layer.attention)}
    mlp = {"ffn_hidden_size": layer.mlp.ffn_hidden_size, "moe": arch.moe}
    return alike(**({"num_layers": num_layers} | rest | attention | mlp | changes))

"""Finds a tensor of ours among the names that others, and earlier versions, give it in Megatron-Core's format.

linear_qkv.layer_norm_weight, input_layernorm.weight      a norm of Transformer Engine's fused layers, and by itself
decoder.layers.X (axis 0: the layer), decoder.layers.7.X  layers that are alike, and layers that may differ
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_LAYERS = "decoder.layers."
_SAME = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def as_stored(part: ShardedTensor, stored: Container[str]) -> ShardedTensor:
    """Give a part of a tensor the name and the place that it has in a checkpoint; none of either: as it was.

    Args:
        stored: names in the checkpoint.
    """
    for key in _names(part.key):
        if key in stored:
            return replace(part, key=key)
        if key.startswith(_LAYERS) and part.prepend_axis_num:
            of_layer = key.replace(_LAYERS, f"{_LAYERS}{part.global_offset[0]}.", 1)
            if of_layer in stored:
                return _without_layer_axis(part, of_layer)
    return part


def all_as_stored(parts: Any, stored: Container[str]) -> Any:
    """Do so with each tensor of a sharded state dict."""
    return dict_list_map_outplace(lambda x: as_stored(x, stored) if isinstance(x, ShardedTensor) else x, parts)


def shape_problem(part: ShardedTensor, stored: object) -> str | None:
    """Say that a checkpoint lacks a tensor of the model, or has it in another shape; None if it has it.

    A vocabulary that is padded further than the model's is no other shape.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return f"it has no {part.key}: it is no checkpoint of this model"
    shape, needed = list(stored.size), list(part.global_shape)
    if shape == needed or (part.allow_shape_mismatch and shape[0] >= needed[0] and shape[1:] == needed[1:]):
        return None
    return f"{part.key} has shape {shape}, the model's is {needed}: it is no checkpoint of this model"


def _names(key: str) -> Iterator[str]:
    yield key
    for pair in _SAME:
        for name, other in (pair, pair[::-1]):
            if name in key:
                yield key.replace(name, other)


def _without_layer_axis(part: ShardedTensor, key: str) -> ShardedTensor:
    fragments = part.axis_fragmentations
    return replace(
        part,
        key=key,
        global_shape=part.global_shape[1:],
        global_offset=part.global_offset[1:],
        axis_fragmentations=None if fragments is None else fragments[1:],
        prepend_axis_num=part.prepend_axis_num - 1,
    )

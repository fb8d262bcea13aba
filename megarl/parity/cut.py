"""Makes the folder that is compared: the model's own, or a temporary one with its first layers or random weights."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.export_huggingface import append
from megarl.checkpoint.huggingface_folder import CONFIG, SINGLE, read_config, weight_entries, without_further_layers
from megarl.checkpoint.safetensors_file import SafetensorsWriter, copy_tensors
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.tensors import LogicalTensor
from megarl.models.weights import logical_tensors


def first_layers(arch: Architecture, each: int) -> int:
    """Count the first layers among which there are `each` of every kind, or as many as the model has.

    Three dense layers and 58 with experts, one of each: 4.
    """
    missing = {kind: min(each, count) for kind, count in Counter(arch.each_layer).items()}
    for number, kind in enumerate(arch.each_layer):
        if not any(missing.values()):
            return number
        missing[kind] = max(0, missing[kind] - 1)
    return arch.num_layers


def cut_config(config: dict[str, Any], layers: int, count: int) -> dict[str, Any]:
    """Change `config.json` to the first `count` of so many layers; lists with an entry per layer are cut, too."""
    lists = {key: value[:count] for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    return {**without_further_layers(config), **lists, "num_hidden_layers": count}


def cut_to(arch: Architecture, count: int) -> Architecture:
    """Keep the first `count` layers."""
    runs = ((kind, len(list(run))) for kind, run in groupby(arch.each_layer[:count]))
    return replace(arch, layers=tuple(runs))


@contextmanager
def folder_to_compare(folder: str, arch: Architecture, *, count: int, random_init: bool) -> Iterator[str]:
    """Yield a folder with the first `count` layers of a model and exactly their tensors; its own if that is the whole.

    Args:
        random_init: the weights are random, and `folder` needs none.

    Raises:
        ValueError: the model cannot be cut, since a model of so few layers would be another one.
    """
    if count == arch.num_layers and not random_init:
        yield folder
        return
    with TemporaryDirectory(prefix="megarl-check-") as temporary:
        config = read_config(folder)
        if count < arch.num_layers:
            config = cut_config(config, arch.num_layers, count)
        with open(os.path.join(temporary, CONFIG), "w", encoding="utf-8") as f:
            json.dump(config, f)
        small = read_architecture(temporary)
        if small.each_layer != arch.each_layer[:count]:
            raise ValueError(f"--layers: the first {count} of {arch.num_layers} layers are no model of their own")
        _write(folder, os.path.join(temporary, SINGLE), small, random_init=random_init)
        yield temporary


def _write(folder: str, file: str, arch: Architecture, *, random_init: bool) -> None:
    tensors = logical_tensors(arch)
    if random_init:
        writer = SafetensorsWriter(file, [(tensor.name, "F32", tensor.hf_shape) for tensor in tensors.values()])
        for number, tensor in enumerate(tensors.values()):
            append(writer, _random(tensor, number))
        return
    entries = weight_entries(folder, tensors)
    copy_tensors(file, {name: entries[name] for name in tensors})


def _random(tensor: LogicalTensor, seed: int) -> Tensor:
    """Draw weights among which none is 0 or 1 by default, so that each one matters; float32 in the file's shape."""
    noise = torch.randn(tensor.hf_shape, generator=torch.Generator().manual_seed(seed))
    if tensor.kind == "norm":
        return 1 + 0.1 * noise
    return noise * (1 / math.sqrt(tensor.hf_shape[-1]) if tensor.kind == "matrix" and noise.ndim > 1 else 0.1)

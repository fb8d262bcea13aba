"""Compares names and shapes of a model's tensors: in the files, in the family, in `transformers`; no weight is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch

from megarl.checkpoint.huggingface_folder import check_weights, weight_entries
from megarl.checkpoint.verify import in_file_names
from megarl.models.architecture import Architecture
from megarl.models.placements import Placement
from megarl.models.tensors import Box, intersect, volume
from megarl.models.weights import engine_placements, logical_tensors, training_placements
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout
from megarl.parity.result import Result, verdict

Shapes = Mapping[str, tuple[int, ...]]


def compare_tensors(folder: str, arch: Architecture, *, has_weights: bool) -> Result:
    """Compare the tensors that the family names with those of `transformers` and, where there are some, of the files.

    Raises:
        ValueError: transformers does not know the model, or a file cannot be read.
    """
    wanted = {tensor.name: tensor.hf_shape for tensor in logical_tensors(arch).values()}
    lines = differences(transformers_shapes(folder), wanted, "transformers", "the family")
    if has_weights:
        lines += _in_files(folder, arch, wanted)
    lines += placed_otherwise(arch)
    places = "files, family and transformers" if has_weights else "family and transformers"
    return verdict("tensors", f"{len(wanted)} names and shapes", places, lines)


def _in_files(folder: str, arch: Architecture, wanted: Shapes) -> list[str]:
    try:
        check_weights(folder, arch)
    except ValueError as e:
        stored = {name: entry.shape for name, entry in weight_entries(folder, wanted).items()}
        return differences(stored, wanted, "the files", "the family") or [str(e)]
    return []


def differences(got: Shapes, wanted: Shapes, here: str, there: str) -> list[str]:
    """Name each tensor that only one of them has, or that has two shapes, in the order of the model."""
    lines = []
    for name, shape in wanted.items():
        if name not in got:
            lines.append(f"{name} {list(shape)}: not in {here}")
        elif got[name] != shape:
            lines.append(f"{name}: {list(got[name])} in {here}, {list(shape)} in {there}")
    return lines + [f"{name} {list(got[name])}: only in {here}" for name in got if name not in wanted]


def transformers_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Give the shape of each tensor that `transformers` would save, by its name in the file.

    Raises:
        ValueError: it knows no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as e:  # the library raises anything
        raise ValueError(f"transformers cannot read '{folder}': {' '.join(str(e).split())[:200]}") from e
    return {name: tuple(tensor.shape) for name, tensor in in_file_names(model, model.state_dict()).items()}


def placed_otherwise(arch: Architecture) -> list[str]:
    """Name the tensors whose elements one rank, training or generating, does not hold exactly once."""
    layout = TrainLayout(ranks=range(1))
    sides: dict[str, Iterable[Placement]] = {
        "training": training_placements(arch, layout, 0),
        "generation": engine_placements(arch, TensorSplit(), 0),
    }
    lines = []
    for side, placements in sides.items():
        boxes: defaultdict[str, list[Box]] = defaultdict(list)
        for placement in placements:
            boxes[placement.tensor].append(placement.box)
        for name, tensor in logical_tensors(arch).items():
            held = sum(map(volume, boxes[name]))
            if held != math.prod(tensor.shape):
                lines.append(f"{name}: {side} holds {held} of {math.prod(tensor.shape)} elements")
            elif any(intersect(a, b) for a, b in combinations(boxes[name], 2)):
                lines.append(f"{name}: {side} holds elements twice")
    return lines

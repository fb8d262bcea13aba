"""Finds each expert in files that have all of a layer's in one tensor, as transformers saves some models."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import product

from megarl.checkpoint.safetensors_file import Entry

_STACKED = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)")


def unstacked(entries: Mapping[str, Entry], names: Container[str]) -> dict[str, Entry]:
    """Replace each tensor of all experts, [experts, rows, columns], by those of single experts, which are parts of it.

    An expert's gate and up projections are one behind the other in its rows.

    Args:
        entries: what the files have, by name.
        names: of the model's tensors; where these are not of single experts, nothing is replaced.
    """
    result = {}
    for name, entry in entries.items():
        match = _STACKED.fullmatch(name)
        if match is None or not _is_of(match[1], entry.shape, names) or f"{match[1]}0.down_proj.weight" in entries:
            result[name] = entry
            continue
        matrices = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        count, rows, columns = entry.shape
        rows //= len(matrices)
        size = (entry.stop - entry.start) // (count * len(matrices))
        for i, (expert, (k, matrix)) in enumerate(product(range(count), enumerate(matrices))):
            start = entry.start + i * size
            result[f"{match[1]}{expert}.{matrix}.weight"] = replace(
                entry, shape=(rows, columns), start=start, stop=start + size, place=(expert, k * rows)
            )
    return result


def _is_of(module: str, shape: tuple[int, ...], names: Container[str]) -> bool:
    """Tell whether there is a matrix for each of some experts, and no more than the model has."""
    return len(shape) == 3 and 0 not in shape and f"{module}{shape[0] - 1}.down_proj.weight" in names

"""Stores large state of a run in a checkpoint: named arrays in a file, which one rank reads for all."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megarl.checkpoint.manifest import one_line
from megarl.checkpoint.stored_objects import is_compressed
from megarl.parallel.world import World

Array = npt.NDArray[Any]


def write_arrays(folder: str, name: str, arrays: Mapping[str, Array]) -> None:
    """Write FOLDER/NAME.npz. Raises OSError."""
    named: dict[str, Any] = dict(arrays)
    with open(_file(folder, name), "wb") as f:
        np.savez(f, **named)


def read_arrays(folder: str, name: str, world: World) -> dict[str, Array]:
    """Read FOLDER/NAME.npz on the first rank and send the arrays to the others; every rank calls it.

    Raises:
        ValueError: on every rank, in one line, if the file cannot be read.
    """
    arrays: dict[str, Array] = {}
    kinds: Any = None
    if world.rank == 0:
        file = _file(folder, name)
        try:
            with zipfile.ZipFile(file) as archive:
                if is_compressed(archive):
                    raise ValueError("it is compressed")
            with np.load(file, allow_pickle=False) as stored:  # a pickle would run code
                arrays = {key: np.ascontiguousarray(stored[key]) for key in stored.files}
            kinds = {key: (array.dtype.str, array.shape) for key, array in arrays.items()}
        except Exception as e:  # whatever reading a damaged file raises
            kinds = f"{os.path.basename(file)} cannot be read: {one_line(e)}"
    kinds = world.broadcast(kinds, "arrays of a checkpoint")
    if isinstance(kinds, str):
        raise ValueError(kinds)
    for key, (dtype, shape) in kinds.items():
        array = arrays.setdefault(key, np.empty(shape, dtype))
        if array.size:
            world.broadcast_(torch.from_numpy(array.reshape(-1).view(np.uint8)), "arrays of a checkpoint")
    return arrays


def _file(folder: str, name: str) -> str:
    return os.path.join(folder, f"{name}.npz")

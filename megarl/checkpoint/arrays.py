"""Stores large state of a run in a checkpoint: named arrays in files, one of each rank that has some of them."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megarl.checkpoint.manifest import one_line, read_manifest
from megarl.checkpoint.stored_objects import is_compressed
from megarl.parallel.world import World

_PART = re.compile(r".+\.[0-9]{5,}\.npz")

Array = npt.NDArray[Any]


def write_arrays(folder: str, name: str, arrays: Mapping[str, Array], rank: int) -> str:
    """Write a rank's part, FOLDER/NAME.npz of the first and FOLDER/NAME.00012.npz of another; returns the file's name.

    Raises:
        OSError: it cannot be written.
    """
    named, file = dict[str, Any](arrays), _file(name, rank)
    with open(os.path.join(folder, file), "wb") as f:
        np.savez(f, **named)
    return file


def is_part(file: str) -> bool:
    """Tell whether a file is a part that another rank than the first has written."""
    return _PART.fullmatch(file) is not None


def read_arrays(folder: str, name: str, world: World) -> Iterator[dict[str, Array]]:
    """Read the parts on the first rank and send the arrays of each to the others; every rank calls it.

    Raises:
        ValueError: on every rank, in one line, if a file cannot be read.
    """
    files: Any = None
    if world.rank == 0:
        try:
            others = [file for file in read_manifest(folder) if is_part(file) and file.startswith(f"{name}.")]
            files = [_file(name, 0), *sorted(others)]
        except Exception as e:  # whatever reading a damaged file raises
            files = one_line(e)
    for file in _same(world, files):
        yield _read(os.path.join(folder, file), world)


def _read(file: str, world: World) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    kinds: Any = None
    if world.rank == 0:
        try:
            with zipfile.ZipFile(file) as archive:
                if is_compressed(archive):
                    raise ValueError("it is compressed")
            with np.load(file, allow_pickle=False) as stored:  # a pickle would run code
                arrays = {key: np.ascontiguousarray(stored[key]) for key in stored.files}
            kinds = {key: (array.dtype.str, array.shape) for key, array in arrays.items()}
        except Exception as e:  # whatever reading a damaged file raises
            kinds = f"{os.path.basename(file)} cannot be read: {one_line(e)}"
    for key, (dtype, shape) in _same(world, kinds).items():
        array = arrays.setdefault(key, np.empty(shape, dtype))
        if array.size:
            world.broadcast_(torch.from_numpy(array.reshape(-1).view(np.uint8)), "arrays of a checkpoint")
    return arrays


def _same(world: World, found: Any) -> Any:
    """Send what the first rank found to all, or raise ValueError on all with its text."""
    found = world.broadcast(found, "arrays of a checkpoint")
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _file(name: str, rank: int) -> str:
    return f"{name}.{rank:05d}.npz" if rank else f"{name}.npz"

"""Large state of a run in a checkpoint: arrays in a file of their own, which one rank reads for all."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from megarl.checkpoint.manifest import one_line
from megarl.checkpoint.stored_objects import is_compressed
from megarl.parallel.world import World

Array = npt.NDArray[Any]


@runtime_checkable
class HasArrays(Protocol):
    """Something whose state is more than fits in JSON, the same on every rank."""

    def state(self) -> Any:
        """What is small of it, in JSON's values."""
        ...

    def keep(self) -> HasArrays:
        """As it is now, for a save that may come later: arrays are made then."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Numbers by name."""
        ...

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Go on where `arrays` were taken. Raises ValueError, in one line, if they are no such ones."""
        ...


def file_of(folder: str, name: str) -> str:
    """Where a checkpoint has the arrays of what joined the run under that name."""
    return os.path.join(folder, f"{name}.npz")


def write_arrays(file: str, arrays: Mapping[str, Array]) -> None:
    """Write a file. Raises OSError."""
    named: dict[str, Any] = dict(arrays)
    with open(file, "wb") as f:
        np.savez(f, **named)


def read_arrays(file: str, world: World) -> dict[str, Array]:
    """Read a file on the first rank and send it to the others; every rank calls it.

    Args:

    Raises:
        ValueError: on every rank, in one line, if it cannot be read.
    """
    arrays: dict[str, Array] = {}
    told: Any = None
    if world.rank == 0:
        try:
            with zipfile.ZipFile(file) as whole:
                if is_compressed(whole):
                    raise ValueError("it is compressed")
            with np.load(file, allow_pickle=False) as stored:  # a pickle would run code
                arrays = {name: np.ascontiguousarray(stored[name]) for name in stored.files}
            told = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        except Exception as e:  # whatever reading a damaged file raises
            told = f"{os.path.basename(file)} cannot be read: {one_line(e)}"
    told = world.broadcast(told, "arrays of a checkpoint")
    if isinstance(told, str):
        raise ValueError(told)
    for name, (dtype, shape) in told.items():
        array = arrays.setdefault(name, np.empty(shape, dtype))
        if array.size:
            world.broadcast_(torch.from_numpy(array.reshape(-1).view(np.uint8)), "arrays of a checkpoint")
    return arrays

"""Reads the arguments of the program that wrote a checkpoint, without running the pickle that holds them.

Megatron-LM keeps them in `common.pt` as an `argparse.Namespace`, with members of enumerations and functions in it.
Numbers and texts are read; everything else becomes an object that does nothing.
"""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any, ClassVar

from megarl.checkpoint.manifest import one_line
from megarl.checkpoint.stored_objects import COMMON_FILE, Unpickler, WouldRunCode, check_cost
from megarl.telemetry.lines import only_file

_MOST_BYTES = 2**26
_NAMESPACES = {("argparse", "Namespace"), ("types", "SimpleNamespace")}

Plain = bool | int | float | str | None


class _Arguments:
    """Holds the attributes of a namespace."""


class _Inert:
    """Stands for an object, or a class, that nobody looks up: it is made, filled and called, and does nothing."""

    def __init__(self, *values: object) -> None:
        del values

    def append(self, value: object) -> None:
        del value

    def extend(self, values: object) -> None:
        del values

    def __setitem__(self, key: object, value: object) -> None:
        del key, value


class _ArgumentsUnpickler(Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _NAMESPACES:
            return _Arguments
        try:
            return super().find_class(module, name)
        except WouldRunCode:
            return _Inert

    def persistent_load(self, pid: Any) -> Any:
        del pid
        return _Inert()

    def load_build(self) -> None:
        """Set the attributes of a namespace; nothing of any other object."""
        *_, target, state = self.stack  # type: ignore[attr-defined]
        if type(target) is _Arguments and isinstance(state, dict):
            vars(target).update({name: value for name, value in state.items() if type(name) is str})
        self.stack.pop()  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {**Unpickler.dispatch, b"b"[0]: load_build}


def read_arguments(folder: str) -> dict[str, Plain]:
    """Read the numbers and texts among the arguments; none if the checkpoint has no arguments.

    Raises:
        ValueError: in one line, if the file is damaged, or asks for memory or time beyond its size.
    """
    try:
        with open(os.path.join(folder, COMMON_FILE), "rb", opener=only_file) as f:
            stream = io.BytesIO(f.read(_MOST_BYTES + 1))
        if stream.getbuffer().nbytes > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        check_cost(stream)
        with zipfile.ZipFile(stream) as archive:
            (name,) = (name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
            common = _ArgumentsUnpickler(io.BytesIO(archive.read(name))).load()
        arguments = common.get("args") if isinstance(common, dict) else None
    except Exception as e:  # whatever reading a damaged file raises
        raise ValueError(f"{COMMON_FILE} cannot be read: {one_line(e)}") from e
    values = vars(arguments) if type(arguments) is _Arguments else {}
    return {name: value for name, value in values.items() if type(value) in (bool, int, float, str)}

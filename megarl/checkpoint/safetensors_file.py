"""Reads headers of safetensors files without the tensors, and writes files one tensor at a time. Torch-free.

A file is 8 bytes with the header's length, the header (JSON: name -> dtype, shape, byte range of the data), the data.
`safetensors.torch.save_file` needs all tensors of a file at once; a header is known before its tensors are.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes per element of the types that a weight may have."""

LONGEST_HEADER = 100_000_000
"""Bytes; as in the format's library."""
_MOST_AXES = 16


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Describes a tensor in a file.

    Attributes:
        file: path.
        name: of the tensor in the file.
        dtype: name of the type in the format, such as "BF16".
        shape: size of each axis.
        start, stop: bytes of the file that are its elements, row-major.
        place: of a matrix that is a part of the tensor `name`: its index along the first axis, and its first row.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    place: tuple[int, int] | None = None


def read_header(file: str) -> dict[str, Entry]:
    """List the tensors of a file by name. Raises ValueError if it is not a whole safetensors file."""
    try:
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            size = os.fstat(f.fileno()).st_size
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(f.read(length))
        entries = {}
        for name, tensor in header.items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                shape, itemsize = tuple(tensor["shape"]), ITEMSIZE.get(tensor["dtype"])
                if not all(type(number) is int and 0 <= number < 2**63 for number in (first, last, *shape)):
                    raise ValueError(f"{name} has sizes or places that are none")
                fits = len(shape) <= _MOST_AXES and first <= last
                if not fits or (itemsize is not None and last - first != math.prod(shape) * itemsize):
                    raise ValueError(f"{name} of shape {list(shape)} would be bytes {first} to {last}")
                start, stop = (8 + length + at for at in (first, last))
                entries[name] = Entry(file=file, name=name, dtype=tensor["dtype"], shape=shape, start=start, stop=stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"'{file}' is not a safetensors file: {e}") from e
    end = max((entry.stop for entry in entries.values()), default=0)
    if end > size:
        raise ValueError(f"'{file}' is cut short: {size} bytes of {end}; copy it again")
    return entries


def copy_tensors(file: str, entries: Mapping[str, Entry]) -> None:
    """Write tensors of other files into a new one, bit for bit, under these names."""
    writer = SafetensorsWriter(file, [(name, entry.dtype, entry.shape) for name, entry in entries.items()])
    for entry in entries.values():
        with (
            open(entry.file, "rb") as f,
            mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as whole,
            whole[entry.start : entry.stop] as elements,
        ):
            writer.write(elements)


class SafetensorsWriter:
    """Writes a file whose tensors are named at once, and written one by one in that order."""

    def __init__(self, file: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """
        Args:
            tensors: name of each, name of its type in the format, and shape.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        self._sizes = []
        for name, dtype, shape in tensors:
            size = math.prod(shape) * ITEMSIZE[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            self._sizes.append(size)
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data start at a multiple of 8 bytes, so that they can be mapped
        self._file = open(file, "wb")  # noqa: SIM115
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._written = 0

    def write(self, data: memoryview) -> None:
        """Write the elements of the next tensor, row-major; after the last one the file is on the disk and closed."""
        written = self._file.write(data)
        assert written == self._sizes[self._written], "a tensor of another size than announced"
        self._written += 1
        if self._written == len(self._sizes):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

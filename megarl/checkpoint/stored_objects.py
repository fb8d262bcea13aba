"""Reads the pickles of a checkpoint without running code: a stranger may have written them.

A pickle names classes and functions, and the reader calls them: `os.system` as readily as `torch.Size`. This reader
admits only the plain classes of a checkpoint's description, and, in objects, the values that torch admits with
`weights_only=True`.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import _get_layout

from megarl.checkpoint.manifest import one_line
from megarl.telemetry.lines import only_file

if TYPE_CHECKING:  # a launcher checks a run without Megatron-Core
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"

_RECORDS = (
    *(Metadata, StorageMeta, MetadataIndex, _StorageInfo, _StoragePrefix),
    *(BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, TensorStorageMetadata),
    *(SavePlan, WriteItem, TensorWriteData),
)
"""Dataclasses: the only objects whose attributes a pickle may set."""

_MOST_BYTES = 2**30
"""Of the description of a checkpoint's tensors, at most."""
_MOST_PARTS = 10_000
"""Of a tuple in a pickle, at most; the tuples that `torch.save` writes have some twenty."""


def _of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict a function that hashes its arguments to numbers and texts."""

    def call(*values: Any) -> Any:
        if not all(type(value) in (int, str) for value in values):
            raise pickle.UnpicklingError("it looks up what is neither a number nor a text")
        return function(*values)

    return call


def _member(looked_up: Any, name: Any) -> Any:
    """Find a member of an enumeration by its name: Python 3.11.2, say, pickles it as `getattr(kind, name)`."""
    for kind in _ENUMERATIONS:
        if looked_up is _ADMITTED[kind.__module__, kind.__qualname__] and type(name) is str:
            return kind[name]
    raise WouldRunCode("would run code: it names builtins.getattr, which is no part of a checkpoint")


_ENUMERATIONS: tuple[Any, ...] = (_MEM_FORMAT_ENCODING, WriteItemType)
_ADMITTED: dict[tuple[str, str], Any] = {
    **{(admitted.__module__, admitted.__qualname__): admitted for admitted in _RECORDS},
    **{(kind.__module__, kind.__qualname__): _of_plain(kind) for kind in _ENUMERATIONS},
    ("builtins", "getattr"): _member,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _of_plain(_get_layout),
    ("collections", "OrderedDict"): _of_plain(OrderedDict),
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    # of Megatron-Core before 0.16
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
}


class WouldRunCode(ValueError):
    """Refuses a pickle that names something other than plain data; says what."""


class Unpickler(pickle._Unpickler):
    """Unpickles in Python, in memory that the pickle's size bounds; the one in C takes what a damaged byte says."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _ADMITTED:
            named = ascii(f"{module}.{name}"[:200])[1:-1]  # a damaged byte puts lines into it
            raise WouldRunCode(f"would run code: it names {named}, which is no part of a checkpoint")
        return _ADMITTED[module, name]

    def load_build(self) -> None:
        """Set attributes of an instance, never of a class or a function, which the whole program shares."""
        kind = type(self.stack[-2])  # type: ignore[attr-defined]
        if kind not in _RECORDS:
            raise pickle.UnpicklingError(f"it sets attributes of {kind.__name__}")
        super().load_build()  # type: ignore[misc]

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # type: ignore[attr-defined]
        super().load_setitems()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        **{pickle.BUILD[0]: load_build, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems},
    }
    _takes_memory_or_names_nothing = (pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4)
    _hashes = (pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)
    for _opcode in (*_takes_memory_or_names_nothing, *_hashes):
        del dispatch[_opcode[0]]


def _check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys of parts that repeat each other, which take hours to hash. Raises UnpicklingError."""
    if not all(map(_is_key, keys)):
        raise pickle.UnpicklingError("a key in it is no name, no number and no part of a tensor")


def _is_key(key: Any) -> bool:
    """Say whether a key is a name, a number, or a part of a tensor."""
    if type(key) is not MetadataIndex:
        return type(key) in (str, int)
    plain = type(key.fqn) is str and (key.index is None or type(key.index) is int)
    return plain and (key.offset is None or type(key.offset) is torch.Size)


def _check_tuples(pickled: bytes) -> None:
    """Refuse tuples that multiply (ValueError): (t, t) of (t, t), 40 times, is 200 bytes and takes hours to hash."""
    parts: list[int] = []  # of each value on the stack: number of a tuple's parts and of their parts; else 1
    marks: list[int] = []
    kept: dict[Any, int] = {}
    for opcode, place, _ in pickletools.genops(pickled):
        name, before = opcode.name, opcode.stack_before
        if name.endswith("GET"):
            parts.append(kept.get(place, 1))
        elif name == "MEMOIZE" or name.endswith("PUT"):
            kept[len(kept) if name == "MEMOIZE" else place] = parts[-1]
        elif name == "DUP":
            parts.append(parts[-1])
        elif name == "MARK":
            marks.append(len(parts))
        elif name == "POP" and marks and marks[-1] == len(parts):
            marks.pop()
        else:
            has_mark = pickletools.markobject in before
            begin = marks.pop() - before.index(pickletools.markobject) if has_mark else len(parts) - len(before)
            taken = parts[max(begin, 0) :]
            del parts[max(begin, 0) :]
            whole = 1 + sum(taken) if opcode.stack_after == [pickletools.pytuple] else 1
            if whole > _MOST_PARTS:
                raise ValueError("it has tuples that multiply")
            parts += [whole] * len(opcode.stack_after)


def read_metadata(folder: str) -> Metadata:
    """Read the description of a checkpoint's tensors and objects, with the file of each part.

    Raises:
        ValueError: in one line, if the description would run code, or is damaged.
    """
    try:
        with open(os.path.join(folder, METADATA_FILE), "rb", opener=only_file) as f:
            pickled = f.read(_MOST_BYTES + 1)
        if len(pickled) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        metadata = Unpickler(io.BytesIO(pickled)).load()
        _check(metadata, len(pickled))
        _check_files(folder, metadata)
    except WouldRunCode as e:
        raise ValueError(f"{METADATA_FILE} {e}") from None
    except Exception as e:  # whatever reading a damaged file raises
        raise ValueError(f"{METADATA_FILE} cannot be read: {one_line(e)}") from e
    return Metadata(state_dict_metadata=metadata.state_dict_metadata, storage_data=metadata.storage_data)


def read_object(stream: io.BytesIO, name: str) -> Any:
    """Read tensors and plain values in dicts and lists, as `torch.save` wrote them. Raises ValueError with the name."""
    try:
        check_cost(stream)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as e:
        if (named := re.search(r"GLOBAL (\S+)", str(e))) and isinstance(e, pickle.UnpicklingError):
            raise ValueError(f"{name} would run code: it names {named[1]}, which is no plain value") from None
        raise ValueError(f"{name} cannot be read: {one_line(e)} ({type(e).__name__})") from e


def check_cost(stream: io.BytesIO) -> None:
    """Refuse an object that takes more memory than its bytes (ValueError): torch admits `bytearray(1 << 40)`."""
    begin = stream.tell()
    if re.search(rb"c(builtins|__builtin__)\nbytearray\n", stream.getbuffer()):
        raise ValueError("it asks for memory")
    if stream.read(4) != b"PK\x03\x04":
        raise ValueError("it is no archive, as torch.save writes it")
    with zipfile.ZipFile(stream) as archive:
        if is_compressed(archive):
            raise ValueError("it is compressed, as torch.save never does")
        for part in archive.infolist():
            if part.filename.endswith(".pkl"):
                _check_tuples(archive.read(part))
    stream.seek(begin)


def is_compressed(archive: zipfile.ZipFile) -> bool:
    """Say whether a part of an archive may take more memory than its bytes."""
    return any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist())


def read_common(folder: str) -> dict[str, Any]:
    """Read the values that no rank cuts up. Raises ValueError, which names the file."""
    try:
        with open(os.path.join(folder, COMMON_FILE), "rb") as f:
            common = read_object(io.BytesIO(f.read()), COMMON_FILE)
    except OSError as e:
        raise ValueError(f"{COMMON_FILE} cannot be read: {one_line(e)}") from e
    if not isinstance(common, dict):
        raise ValueError(f"{COMMON_FILE} cannot be read: it holds no names")
    return common


class CheckpointReader(FileSystemReader):
    """Reads parts of tensors and objects, after their description.

    Attributes:
        stored: tensors and objects by key.
    """

    def __init__(self, folder: str) -> None:
        """Open a checkpoint; raises ValueError, see `read_metadata`."""
        super().__init__(folder)
        metadata = self.read_metadata()
        self.stored = metadata.state_dict_metadata
        self.set_up_storage_reader(metadata, is_coordinator=True)

    def has_shape_of(self, part: ShardedTensor) -> bool:
        """Say whether a tensor was stored without other rows than this layout pads the vocabulary by."""
        stored = self.stored.get(part.key)
        return isinstance(stored, TensorStorageMetadata) and tuple(stored.size) == tuple(part.global_shape)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(str(self.path))


def _check(metadata: Any, size: int) -> None:
    """Refuse a description that torch could not use. Raises any exception.

    Args:
        size: bytes of its pickle.
    """
    stored, parts = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(stored, dict) or not isinstance(parts, dict):
        raise ValueError("it describes no tensors")
    if sum(len(getattr(what, "chunks", ())) for what in stored.values()) > size:
        raise ValueError("its tensors have more parts than it can name")
    for key, what in stored.items():
        if not isinstance(key, str) or not _is_well_formed(what):
            raise ValueError(f"{str(key)[:200]!r} is described wrongly")
    for index, place in parts.items():
        if not isinstance(index, MetadataIndex) or not _is_place(place):
            raise ValueError(f"{str(getattr(index, 'fqn', index))[:200]!r} lies in no file of the checkpoint")


def _check_files(folder: str, metadata: Metadata) -> None:
    """Refuse a pipe or a device in place of a file: a reader would wait for it. Raises ValueError."""
    for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
        path = os.path.join(folder, name)
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{name} is no file")


def _is_well_formed(what: Any) -> bool:
    if not isinstance(what, TensorStorageMetadata):
        return isinstance(what, BytesStorageMetadata)
    if not isinstance(what.properties, TensorProperties) or not isinstance(what.properties.dtype, torch.dtype):
        return False
    if not isinstance(what.size, torch.Size) or not isinstance(what.chunks, list):
        return False
    if not all(isinstance(chunk, ChunkStorageMetadata) and _is_within(chunk, what.size) for chunk in what.chunks):
        return False
    parts = [(chunk.offsets, volume) for chunk in what.chunks if (volume := math.prod(chunk.sizes))]
    whole = sum(volume for _, volume in parts) == math.prod(what.size)  # else memory would be read
    return whole and len({offsets for offsets, _ in parts}) == len(parts)


def _is_within(chunk: ChunkStorageMetadata, size: Iterable[int]) -> bool:
    if not isinstance(chunk.offsets, torch.Size) or not isinstance(chunk.sizes, torch.Size):
        return False
    axes = zip(chunk.offsets, chunk.sizes, size, strict=True)
    return all(min(start, length) >= 0 and start + length <= whole for start, length, whole in axes)


def _is_place(place: Any) -> bool:
    """Say whether a value is a stretch of a file of the same folder: a path could name any file on the host."""
    if not isinstance(place, _StorageInfo) or type(place.relative_path) is not str:
        return False
    name, numbers = place.relative_path, (place.offset, place.length)
    filters = place.transform_descriptors
    return (
        os.path.basename(name) == name not in ("", ".", "..")
        and all(type(number) is int and number >= 0 for number in numbers)
        and (filters is None or (isinstance(filters, list | tuple) and all(type(x) is str for x in filters)))
    )

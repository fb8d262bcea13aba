"""Reads the rows of Arrow files, as `datasets` writes them with `save_to_disk`. Torch-free."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megarl.data.files import DataFile
from megarl.data.parquet_pages import BATCH_BYTES

if TYPE_CHECKING:
    import pyarrow

_MAGIC = b"ARROW1\0\0"
_END = struct.Struct("<i6s")
"""Length of the footer, and the magic number again."""
_BLOCK_BYTES = 24
_MOST_FIELDS = 10_000
_CURES = dict.fromkeys(
    ("string_view", "binary_view"), "; write texts as large_string (polars: compat_level=pl.CompatLevel.oldest())"
)


def arrow_batches(file: DataFile, what: str, most: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of an Arrow file, in its stream or its file format, at most `most` at a time. Every offset of a
    text is checked before it is used.

    Raises:
        ValueError: it is no Arrow file, is compressed, or has columns whose values take far more memory than the file.
    """
    import pyarrow
    from pyarrow import ipc

    rows = 0
    try:
        with file.open() if file.remote else pyarrow.memory_map(file.place) as f:
            if f.read(len(_MAGIC)) == _MAGIC:
                schema, messages = ipc.open_file(f).schema, _file_messages(f)
            else:
                f.seek(0)
                messages = iter(ipc.MessageReader.open_stream(f))
                schema = ipc.read_schema(next(messages))
            if (count := sum(_fields(schema))) > _MOST_FIELDS:
                raise ValueError(f"it has {count} columns and fields of these; {_MOST_FIELDS} can be read")
            for message in messages:
                if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                    raise ValueError("it is compressed, or has dictionaries; `save_to_disk` of datasets writes neither")
                batch = ipc.read_record_batch(message, schema)
                batch.validate(full=True)
                rows += batch.num_rows
                if rows > file.size:
                    raise ValueError(f"its {file.size} bytes say that they hold {rows} rows")
                for column in batch.columns:
                    _check_lists(column)
                step = max(1, min(most, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)))
                yield from (batch.slice(first, step) for first in range(0, batch.num_rows, step))
    except StopIteration:
        raise ValueError(f"{what}: '{file.name}' is not a readable Arrow file: it ends before its columns") from None
    except (pyarrow.ArrowException, OSError, ValueError, struct.error) as e:
        reason = " ".join(str(e).split())[:300]
        raise ValueError(f"{what}: '{file.name}' is not a readable Arrow file: {reason}") from e


def _file_messages(f: Any) -> Iterator[Any]:
    """Yield the record batches that the footer lists: not every writer begins the file with a whole message."""
    from pyarrow import ipc

    f.seek(-_END.size, os.SEEK_END)
    end = f.tell()
    length, _ = _END.unpack(f.read(_END.size))
    f.seek(end - length)
    footer = f.read(length)
    blocks = _field_at(footer, _table_at(footer, 0), 3)
    if not blocks:
        return
    place = _table_at(footer, blocks)
    (count,) = struct.unpack_from("<I", footer, place)
    for i in range(count):
        (start,) = struct.unpack_from("<q", footer, place + 4 + _BLOCK_BYTES * i)
        f.seek(start)
        yield ipc.read_message(f)


def _fields(of: Any) -> Iterator[int]:
    """Yield 1 for every column, field and type of elements; raises ValueError for types that multiply bytes."""
    from pyarrow import types

    for field in of:
        kind = field.type
        yield 1
        if types.is_struct(kind):
            yield from _fields(kind)
        elif types.is_map(kind):
            yield from _fields([kind.key_field, kind.item_field])
        elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            yield from _fields([kind.value_field])
        elif not (types.is_primitive(kind) or types.is_null(kind) or types.is_decimal(kind) or _is_text(kind)):
            raise ValueError(
                f"column or field '{field.name}' is of the type {kind}, which is not read{_CURES.get(str(kind), '')}"
            )


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return types.is_fixed_size_binary(kind) or any(is_kind(kind) for is_kind in texts)


def _check_lists(array: Any, *, of_list: bool = False) -> None:
    """Raise ValueError for lists whose elements take no bytes: there could be any number of them."""
    from pyarrow import types

    kind = array.type
    if of_list and len(array) and not array.nbytes:
        raise ValueError(f"it has lists of {len(array)} elements without a value")
    if types.is_struct(kind):
        for i in range(kind.num_fields):
            _check_lists(array.field(i))
    elif types.is_map(kind):
        for part in (array.keys, array.items):
            _check_lists(part, of_list=True)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        _check_lists(array.values, of_list=True)


def _is_compressed(metadata: bytes) -> bool:
    """Tell whether a record batch has compressed buffers: field 3 of field 2 of the flatbuffer that describes it."""
    at = _table_at(metadata, 0)
    header = _field_at(metadata, at, 2)
    return header != 0 and _field_at(metadata, _table_at(metadata, header), 3) != 0


def _table_at(buffer: bytes, place: int) -> int:
    return place + int(struct.unpack_from("<I", buffer, place)[0])


def _field_at(buffer: bytes, table: int, number: int) -> int:
    """Find a field of a table; 0 if the table does not have it."""
    fields = table - struct.unpack_from("<i", buffer, table)[0]
    (size,) = struct.unpack_from("<H", buffer, fields)
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, fields + place)[0] if place < size else 0
    return table + int(offset) if offset else 0

"""Turns files of text into lines of JSON, one for each row: .jsonl, .json and .csv, packed or not. Torch-free."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import BinaryIO, cast

from megarl.data.files import DataFile, row_prefix
from megarl.data.parquet_pages import MOST_BYTES, MOST_TIMES

LONGEST_LINE = 64 * 2**20
"""Bytes of a line of a jsonl file, with its end; and of a row in any other file of text."""

BLOCK = 2**20
"""Bytes that a file, or a store, is asked for at a time."""

_BLANKS = re.compile(r"[ \t\r\n]*")
_DATA = re.compile(r'\{\s*"data"\s*:\s*\[')


def json_lines(file: DataFile, what: str) -> Iterator[bytes]:
    """Yield the lines of a .jsonl file as they are, or one for each row of another file of text; some may be blank.

    Args:
        what: the configuration key that names the file, for messages.

    Raises:
        ValueError: the file cannot be read or unpacked, is malformed, has a row that is too long, or comes to more than
            `MOST_TIMES` its bytes.
    """
    written, most = 0, max(MOST_BYTES, MOST_TIMES * file.size)
    try:
        with closing(_opened(file)) as f:
            for number, line in enumerate(_LINES_OF[file.kind](f, file.name, what), start=1):
                if len(line) > LONGEST_LINE:
                    raise too_long(f"{row_prefix(file.name)}{number}", what)
                written += len(line)
                if written > most:
                    raise ValueError(f"{what}: the {file.size} bytes of '{file.name}' come to rows of more than {most}")
                yield line
    except UnicodeDecodeError as e:
        raise ValueError(f"{what}: '{file.name}' is not UTF-8: {e.reason}") from e
    except OSError as e:
        reason = e.strerror or " ".join(str(e).split())[:300]
        raise ValueError(f"{what}: '{file.name}' cannot be read: {reason}") from e


def next_line(f: BinaryIO, source: str, what: str) -> bytes:
    """Read the next line of a file, empty at its end; raises ValueError, naming it, for one that is too long."""
    line = f.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise too_long(source, what)
    return line


def too_long(source: str, what: str) -> ValueError:
    return ValueError(f"{what}: {source} has more than {LONGEST_LINE} bytes; a row can have no more")


def buffered(file: DataFile, size: int) -> BinaryIO:
    """Open a file for buffered reading, which what a store gives cannot do by itself; see `DataFile.open`."""
    opened = file.open()
    return io.BufferedReader(cast(io.RawIOBase, opened), size) if file.remote else opened


def _opened(file: DataFile) -> BinaryIO:
    if not file.packing:
        return buffered(file, BLOCK)
    import pyarrow

    unpacked = pyarrow.CompressedInputStream(file.open(), file.packing)
    return io.BufferedReader(cast(io.RawIOBase, unpacked), BLOCK)


def _of_jsonl(f: BinaryIO, name: str, what: str) -> Iterator[bytes]:
    number = 1
    while line := next_line(f, f"{row_prefix(name)}{number}", what):
        yield line
        number += 1


def _of_json(f: BinaryIO, name: str, what: str) -> Iterator[bytes]:
    """Yield the objects of an array, of {"data": such an array}, or of a file with one object after the other."""
    text, number = _Text(f), 0
    ends = ""
    if text.next() == "[":
        text.at, ends = text.at + 1, "]"
    elif data := _DATA.match(text.text, text.at):
        text.at, ends = data.end(), "]}"
    while (character := text.next()) and not (ends and character == "]"):
        if ends and number:
            text.skip(",", f"{what}: {row_prefix(name)}{number}")
        number += 1
        yield text.value(f"{row_prefix(name)}{number}", what).replace("\n", " ").replace("\r", " ").encode() + b"\n"
    for end in ends:
        text.skip(end, f"{what}: {row_prefix(name)}{number}")
    if text.next():
        raise ValueError(f"{what}: '{name}' goes on behind its {number} rows")


class _Text:
    """Reads a file's text, of which a part is in memory: from a place before `at` to one behind it."""

    def __init__(self, f: BinaryIO) -> None:
        self._f, self._decode = f, codecs.getincrementaldecoder("utf-8-sig")().decode
        self._read_value = json.JSONDecoder().raw_decode
        self.text, self.at, self._ended = "", 0, False

    def next(self) -> str:
        """Move `at` to the next character that is no blank, and return the character; empty at the end."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            assert blanks is not None
            self.at = blanks.end()
            if self.at < len(self.text) or self._ended:
                return self.text[self.at : self.at + 1]
            self._more()

    def skip(self, character: str, place: str) -> None:
        """Move `at` behind a character; raises ValueError if another one is next."""
        if (following := self.next()) != character:
            raise ValueError(f"{place} is followed by {following!r} instead of {character!r}")
        self.at += 1

    def value(self, source: str, what: str) -> str:
        """Cut out the text of the JSON value that is next; raises ValueError if it is no JSON, or is too long."""
        self.next()
        while True:
            try:
                _, end = self._read_value(self.text, self.at)
            except RecursionError as e:
                raise ValueError(f"{what}: {source} is nested too deeply") from e
            except ValueError as e:  # cut off, perhaps
                if len(self.text) - self.at > LONGEST_LINE:
                    raise too_long(source, what) from e
                if self._ended:
                    raise ValueError(f"{what}: {source} is not JSON: {getattr(e, 'msg', e)}") from e
                self._more()
                continue
            value, self.at = self.text[self.at : end], end
            return value

    def _more(self) -> None:
        """Read as much again as is in memory, so that a long value is not parsed once for every block."""
        block = self._f.read(max(BLOCK, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + self._decode(block, not block), 0
        self._ended = not block


def _of_csv(f: BinaryIO, name: str, what: str) -> Iterator[bytes]:
    """Read rows of texts, behind one with the columns' names."""
    size, number = 0, 0

    def lines() -> Iterator[str]:
        nonlocal size
        source, encoding = f"{row_prefix(name)}{number + 1}", "utf-8-sig"
        while line := next_line(f, source, what):
            size += len(line)
            if size > LONGEST_LINE:  # texts in quotes may have many lines
                raise too_long(f"{row_prefix(name)}{number + 1}", what)
            yield line.decode(encoding)
            encoding = "utf-8"

    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(lines(), strict=True)
    try:
        columns = next(rows, [])
        if len(set(columns)) < len(columns):
            raise ValueError(f"{what}: the first row of '{name}' names a column twice")
        for number, values in enumerate(rows, start=1):
            size = 0
            if values and len(values) != len(columns):
                raise ValueError(
                    f"{what}: {row_prefix(name)}{number} has {len(values)} values for {len(columns)} columns"
                )
            yield json.dumps(dict(zip(columns, values, strict=True))).encode() + b"\n" if values else b"\n"
    except csv.Error as e:
        raise ValueError(f"{what}: {row_prefix(name)}{number + 1} is not CSV: {e}") from e


_LINES_OF: Mapping[str, Callable[[BinaryIO, str, str], Iterator[bytes]]] = {
    "jsonl": _of_jsonl,
    "json": _of_json,
    "csv": _of_csv,
}

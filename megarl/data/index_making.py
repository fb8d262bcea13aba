"""Makes the index of the rows of some files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megarl.data.files import DataFile, row_prefix
from megarl.data.json_lines import LONGEST_LINE, json_lines, too_long
from megarl.data.readers import BATCH_ROWS, is_table, no_rows, table_batches
from megarl.data.row_cache import Progress
from megarl.data.row_index import Index, mapped
from megarl.data.scan import FIELDS, MOST_SOURCES, Scan, Scanned, Unsettled, checks_of, open_lines
from megarl.data.scan_workers import ScanWorkers, Stretch, look_at
from megarl.data.settle import Settler
from megarl.data.source import spool
from megarl.data.tokenizer import Tokenizer

STRETCH_BYTES = 4 * 2**20
"""Of a jsonl file that a process looks at in one go."""

HELD_BYTES = 512 * 2**20
"""Of the rows of a table or a packed file, however small the file is, that are held in memory."""

ARROW_BYTES = 64 * 2**20
"""Of rows that wait to be a batch of an Arrow file."""

SAY_EVERY_SECONDS = 10.0


class TooLarge(ValueError):
    """Raised for rows that are too large for memory and must be in a folder."""


def make_index(
    files: list[DataFile], scan: Scan, tokenizer: Tokenizer, folder: Path | None, progress: Progress
) -> Index:
    """Look at every row of the files, or of `data.source` where there are none.

    Args:
        folder: to write to, with other processes for the work; None: all in memory, by this one.

    Raises:
        TooLarge: without a folder, the rows of a file come to more than `HELD_BYTES`.
        ValueError: the first row that cannot be used; a file that is malformed.
        OSError: the folder cannot hold the index.
    """
    making = _Making(scan, tokenizer, folder, progress)
    if folder is not None:
        with ScanWorkers(scan) as workers:
            making.add(workers.look_at(making.stretches(files)))
    else:
        making.add(look_at(stretch, scan) for stretch in making.stretches(files))
    return making.finished()


class _Making:
    """Builds an index, stretch by stretch."""

    def __init__(self, scan: Scan, tokenizer: Tokenizer, folder: Path | None, progress: Progress) -> None:
        self._scan, self._folder, self._progress = scan, folder, progress
        self._settler = Settler(scan, tokenizer, together=folder is not None)
        self._index = Index(rows=None, tokens=None)
        self._rows, self._tokens = self._output("rows.bin"), self._output("tokens.bin")
        self._stored, self._contents = 0, hashlib.blake2b(digest_size=8)
        self._stretches: list[tuple[int, int]] = []  # file and bytes of each, in order
        self._rows_of: list[int] = []  # seen in each file
        self._done, self._total = 0, 0  # bytes
        self._last_line, self._hint = time.monotonic(), f"; {scan.hint}" if scan.hint else ""

    def stretches(self, files: list[DataFile]) -> Iterator[Stretch]:
        """Divide the files into stretches, in order; fetch and convert files on the way, where they have to be."""
        self._total = sum(file.size for file in files)
        if not files:
            assert self._folder is not None
            spool(self._scan.data.source, self._folder / "0.jsonl", self._scan.what, self._progress)
            yield from self._of_jsonl(self._scan.data.source, 0, str(self._folder / "0.jsonl"), local=False)
        for file in files:
            if is_table(file):
                yield from self._of_table(file)
            elif file.kind == "jsonl" and not (file.remote or file.packing):
                yield from self._of_jsonl(file.name, file.entry, os.path.abspath(file.name), local=True)
            else:
                yield from self._of_jsonl(file.name, file.entry, self._as_jsonl(file), local=False)
            if not file.unchanged():
                raise ValueError(f"{self._scan.what}: '{file.name}' changed while it was read; start again")

    def add(self, results: Iterable[Scanned]) -> None:
        """Add the rows of each stretch to the index, in order."""
        for number, scanned in enumerate(results):
            file, size = self._stretches[number]
            rows, seen = scanned.rows, self._index.seen
            rows["index"] += seen
            rows["file"] = file
            self._scan.settle(scanned)
            kept = self._settle(scanned.unsettled, rows)
            self._store(scanned, rows)
            rows["check"] ^= checks_of(rows)
            if scanned.refusal:
                raise ValueError(scanned.refusal)
            self._rows.write(rows[kept].tobytes())
            self._index.seen += scanned.seen
            self._index.filtered += scanned.filtered
            self._index.overlong += scanned.overlong
            self._index.special += scanned.special
            self._index.same += scanned.same
            if len(self._index.sources) < MOST_SOURCES:
                self._index.sources |= scanned.sources
            self._rows_of[file] += scanned.seen
            self._done += size
            self._progress()
            self._say()
        for (name, *_), count in zip(self._index.files, self._rows_of, strict=True):
            if not count:
                raise no_rows(name, self._scan.what)

    def finished(self) -> Index:
        """Finish the index, without its duplicates if these are to be dropped."""
        index = self._index
        index.rows, index.tokens = self._input(self._rows, FIELDS), self._input(self._tokens, np.dtype("<i4"))
        if self._scan.training and self._scan.data.drop_duplicates and len(index.rows):
            first = np.zeros(len(index.rows), bool)
            first[np.unique(index.rows["prompt"], return_index=True)[1]] = True
            index.duplicates = int((~first).sum())
            index.rows = index.rows[first] if self._folder is None else _rewritten(index.rows, first)
        if self._scan.read_again:
            index.digest = _digest(index.rows, self._scan)
        else:
            index.digest = self._contents.hexdigest()
            self._forget_rows()
        return index

    def _store(self, scanned: Scanned, rows: Any) -> None:
        """Store the examples of a stretch."""
        if scanned.tokens:
            rows["tokens_at"] += self._stored
            self._tokens.write(scanned.tokens)
            self._stored += len(scanned.tokens) // 4
            self._contents.update(scanned.contents)

    def _forget_rows(self) -> None:
        """Drop the paths and copies that rows would be read from again."""
        for number, (name, entry, kind, _) in enumerate(self._index.files):
            self._index.files[number] = name, entry, kind, ""
        for path in [] if self._folder is None else self._folder.iterdir():
            if path.suffix in (".jsonl", ".arrow"):
                path.unlink()

    def _settle(self, prompts: list[Unsettled], rows: Any) -> Any:
        """Store the tokens of prompts that had to be tokenised; return which rows are kept."""
        kept = np.ones(len(rows), bool)
        for prompt, tokens in self._settler.settle(prompts):
            if tokens is None:
                kept[prompt.place] = False
                self._index.overlong += 1
                continue
            stored = np.asarray(tokens, "<i4").tobytes()
            if prompt.place < len(rows):
                rows["tokens_at"][prompt.place], rows["tokens"][prompt.place] = self._stored, len(tokens)
                rows["check"][prompt.place] = zlib.crc32(stored)
            self._tokens.write(stored)
            self._stored += len(tokens)
        return kept

    def _of_jsonl(self, name: str, entry: int, source: str | bytes, *, local: bool) -> Iterator[Stretch]:
        kept = source if local or isinstance(source, bytes) else os.path.basename(source)
        number = self._add_file(name, entry, "jsonl", kept)
        try:
            with open_lines(source) as f:
                for start, end, line in _stretches(f, row_prefix(name), self._scan.what):
                    self._stretches.append((number, end - start))
                    yield Stretch("jsonl", source, name, start, end, line)
        except OSError as e:
            if not local:
                raise
            raise ValueError(f"{self._scan.what}: '{name}' cannot be read: {e.strerror}") from e

    def _as_jsonl(self, file: DataFile) -> str | bytes:
        """Write a file's rows as lines of JSON, to the folder or to memory; return the path or the bytes."""
        lines = json_lines(file, self._scan.what)
        if self._folder is None:
            return b"".join(self._held(lines, file, len))
        path = self._folder / f"{len(self._index.files)}.jsonl"
        with open(path, "wb") as out:
            for number, line in enumerate(lines):
                out.write(line)
                if number % 1000 == 0:
                    self._progress()
        return str(path)

    def _of_table(self, file: DataFile) -> Iterator[Stretch]:
        import pyarrow

        path = None if self._folder is None else str(self._folder / f"{len(self._index.files)}.arrow")
        sink = pyarrow.BufferOutputStream() if path is None else pyarrow.OSFile(path, "wb")
        batches = table_batches(file, self._scan.what)
        with sink if path else nullcontext():
            bounded = batches if path else self._held(batches, file, lambda batch: batch.nbytes)
            sizes = _write_arrow(bounded, sink, self._progress)
        source = path or sink.getvalue()
        number = self._add_file(file.name, file.entry, "arrow", os.path.basename(path) if path else source)
        step, line = 16 if self._scan.read_again else 1, 1  # the tokens of a stretch are in memory
        for first in range(0, len(sizes), step):
            rows = sum(sizes[first : first + step])
            self._stretches.append((number, file.size * rows // sum(sizes)))
            yield Stretch("arrow", source, file.name, first, min(first + step, len(sizes)), line)
            line += rows

    def _held(self, parts: Iterator[Any], file: DataFile, size_of: Callable[[Any], int]) -> Iterator[Any]:
        """Pass the parts on; raises TooLarge when they are more than memory should hold."""
        size = 0
        for part in parts:
            size += size_of(part)
            if size > HELD_BYTES:
                raise TooLarge(f"{self._scan.what}: '{file.name}' comes to rows of more than {HELD_BYTES} bytes")
            yield part

    def _add_file(self, name: str, entry: int, kind: str, path: Any) -> int:
        self._index.files.append((name, entry, kind, path))
        self._rows_of.append(0)
        return len(self._rows_of) - 1

    def _output(self, name: str) -> BinaryIO:
        return io.BytesIO() if self._folder is None else open(self._folder / name, "wb")

    def _input(self, written: BinaryIO, dtype: np.dtype[Any]) -> Any:
        if isinstance(written, io.BytesIO):
            return np.frombuffer(written.getvalue(), dtype)
        written.close()
        return mapped(written.name, dtype)

    def _say(self) -> None:
        if self._folder is None or time.monotonic() - self._last_line < SAY_EVERY_SECONDS:
            return
        self._last_line = time.monotonic()
        part = f"{self._done / self._total:.0%} of {self._total / 1e9:.1f} GB looked at, " if self._total else ""
        print(f"megarl: {self._scan.what}: {part}{self._index.seen} rows{self._hint}", file=sys.stderr, flush=True)
        self._hint = ""


def _stretches(f: BinaryIO, prefix: str, what: str) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, byte behind the last, number of the first line) of parts that end with a line.

    Raises:
        ValueError: a line is too long, and so would be its part.
    """
    start, at, line = 0, 0, 1
    while block := f.read(STRETCH_BYTES):
        if last := block.rfind(b"\n") + 1:
            yield start, at + last, line
            start, line = at + last, line + block.count(b"\n")
        at += len(block)
        if at - start > LONGEST_LINE:
            raise too_long(f"{prefix}{line}", what)
    if at > start:
        yield start, at, line


def _write_arrow(batches: Iterator[Any], sink: Any, progress: Progress) -> list[int]:
    """Write an Arrow file; returns the rows of its batches: `BATCH_ROWS`, or fewer where they are large."""
    import pyarrow

    written: list[int] = []
    waiting: list[Any] = []
    rows, size = 0, 0
    writer: Any = None

    def write() -> None:
        whole = pyarrow.Table.from_batches(waiting).combine_chunks()
        writer.write_table(whole, max_chunksize=BATCH_ROWS)
        written.append(whole.num_rows)
        waiting.clear()

    for batch in batches:
        if not batch.num_rows:
            continue
        if writer is None:
            writer = pyarrow.ipc.new_file(sink, batch.schema)
        if rows + batch.num_rows > BATCH_ROWS or size > ARROW_BYTES:
            write()
            rows, size = 0, 0
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        progress()
    if waiting:
        write()
    if writer is not None:
        writer.close()
    return written


def _digest(rows: Any, scan: Scan) -> str:
    data, step = scan.data, 2**16
    cut: list[str | int] = [data.truncation, data.max_prompt_length] if scan.cuts else []
    cut += ["read_special_tokens"] if data.read_special_tokens else []
    settings = scan.settings if scan.answers else []
    total = hashlib.blake2b(json.dumps([data.answer_key, *cut, *settings]).encode(), digest_size=8)
    for i in range(0, len(rows), step):
        block = rows[i : i + step]
        total.update(np.stack([block["prompt"], block["row"]], 1).tobytes())
    return total.hexdigest()


def _rewritten(rows: np.memmap[Any, Any], kept: Any) -> Any:
    """Replace a mapped file by some of its rows."""
    name, step = str(rows.filename), 2**16
    with open(f"{name}.kept", "wb") as out:
        for i in range(0, len(rows), step):
            out.write(rows[i : i + step][kept[i : i + step]].tobytes())
    os.replace(f"{name}.kept", name)
    return np.memmap(name, rows.dtype, "r")

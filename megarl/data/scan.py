"""Looks at every row once, before a run: where it lies, and whether it can be used. Torch-free, for worker processes.

A prompt is tokenised before the run only if that could tell something: a conversation of a form that the template has
not been seen to take, or what could have too many tokens or none. Of the others `bounded` knows enough, and they are
tokenised when they are drawn: two gigabytes of short questions are looked at in seconds.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from megarl.config.data import DataConfig
from megarl.data.encode import Conversation, prompt_of
from megarl.data.files import row_prefix
from megarl.data.json_lines import next_line
from megarl.data.messages import strings_in, without_nulls
from megarl.data.readers import BATCH_ROWS, Row, has, parse, require_column, value_at, value_or_none
from megarl.data.source import source_version
from megarl.data.tokenizer import Tokenizer
from megarl.own_code import in_a_line
from megarl.registry import Registry
from megarl.rewards.parts import Scorers, refusal_of

FIELDS = np.dtype(
    [
        ("index", "<u4"),  # position in the file list
        ("file", "<u4"),
        ("at", "<i8"),  # byte where the line begins; batch x BATCH_ROWS + row in an Arrow file
        ("size", "<u4"),  # bytes of the line; 0 in an Arrow file; of an example that is tokenised, its tokens
        ("line", "<u4"),  # for people, from 1
        ("prompt", "<u8"),  # digest of the prompt's column, or of what stands for an example's sequences
        ("row", "<u8"),  # digest of the columns; 0 for an example that is tokenised
        ("tokens_at", "<i8"),  # where its tokens begin among those that are stored; -1: none are
        ("tokens", "<u4"),  # numbers that are stored there
        ("check", "<u4"),  # checksum of the other fields and of the stored tokens
        ("value", "<f8"),  # what `data.curriculum` sorts by; an example's label
    ]
)
"""What is kept of a row: 64 bytes."""

MOST_SOURCES = 1000
"""Names of data sources that are collected: more of them are no names of sources."""

_ODD = np.array([2 * (i + 1) * 0x5851F42D4C957F2D + 1 & 2**64 - 1 for i in range(8)], np.uint64)
_encode = json.JSONEncoder(sort_keys=True, default=str).encode
_LETTER = re.compile("[0-9A-Za-z]")
_FILTERS: Registry[Callable[[Mapping[str, Any]], Any]] = Registry("data.filter", "function")


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Holds the rules that every row is looked at by.

    Attributes:
        what: the key that names the files, for messages.
        data: column names and limits.
        bounded: whether ASCII text has at most one token more than characters.
        special_tokens: of the tokenizer, as texts may spell them.
        scorers: that must be able to score a response to a row; empty: nothing is known of them.
        training: whether `data.filter` and `data.curriculum` apply.
        hint: said once, where looking at the rows takes long.
    """

    answers: ClassVar[bool] = False
    """Whether rows come with their answers."""

    what: str
    data: DataConfig
    bounded: bool
    special_tokens: tuple[str, ...] = ()
    scorers: Scorers = ()
    training: bool = True
    hint: str = ""

    @property
    def most_processes(self) -> int:
        """Limit the processes that look at rows: the first has 60 MB, each further one 7 MB more."""
        return 16

    @property
    def read_again(self) -> bool:
        """Tell whether rows are read again when they are drawn; else they are tokenised at once."""
        return True

    @property
    def cuts(self) -> bool:
        """Tell whether a prompt that is too long is cut."""
        return not self.data.filter_overlong_prompts and self.data.truncation != "error"

    def prepare(self) -> None:
        """Load what every process needs, before it is forked; what fails here fails again at the first row."""
        with suppress(ValueError):
            self.keep  # noqa: B018

    @cached_property
    def keep(self) -> Callable[[Row], bool] | None:
        """Return `data.filter` as a function of a row; None if there is none."""
        name = self.data.filter if self.training else ""
        if not name:
            return None
        function = _FILTERS.load(name)

        def keep(row: Row) -> bool:
            try:
                return bool(function(with_answer(row.columns, self.data.answer_key)))
            except (Exception, SystemExit) as e:  # a user's function fails as it likes
                raise ValueError(f"{row.source}: data.filter = {name} failed: {in_a_line(e)}") from e

        return keep

    @property
    def difficulty_key(self) -> str:
        """Return the column that `data.curriculum` sorts by; empty for none."""
        name = self.data.curriculum
        return name if self.training and ":" not in name else ""

    @cached_property
    def spells_special_token(self) -> Callable[[str], object]:
        """Return a function that tells whether a text spells a special token."""
        return finder_of(self.special_tokens)

    @property
    def settings(self) -> list[object]:
        """Return what an index depends on beside files, scorers and the tokenizer."""
        data = self.data
        names = ("prompt_key", "answer_key", "source_key", "tools_key", "max_prompt_length", "filter_overlong_prompts",
                 "truncation", "read_special_tokens")  # fmt: skip
        training = ("filter", "drop_duplicates", "curriculum", "source") if self.training else ()
        code = [data.filter, data.curriculum, data.source] if self.training else []
        return [
            [[name, getattr(data, name)] for name in (*names, *training)],
            [_contents(value.rpartition(":")[0]) for value in [*code, *(name for name, *_ in self.scorers)]],
            source_version(data.source) if self.training and data.source else "",
        ]

    def look_at(self, rows: Iterable[Placed], stem: str) -> Scanned:
        """Look at some rows, one after the other, up to the first that cannot be used.

        Args:
            stem: of their file's name.
        """
        return scan_rows(rows, self, stem)

    def settle(self, scanned: Scanned) -> None:
        """Tokenise what the rows of a chunk, and of those before it, depend on; raises ValueError where that fails."""

    def needs_tokens(self, prompt: str | Conversation) -> bool:
        """Tell whether a prompt has to be tokenised to see that it can be used."""
        return not isinstance(prompt, str) or not self.fits(prompt)

    def fits(self, text: str, overhead: int = 0) -> bool:
        """Tell whether a text certainly has a token, and with `overhead` more tokens not too many."""
        if not (self.bounded and text.isascii() and _LETTER.search(text)) or self.spells_special_token(text):
            return False
        return self.cuts or len(text) + overhead < self.data.max_prompt_length


class Unsettled(NamedTuple):
    """Holds a prompt that has to be tokenised before its row is settled.

    Attributes:
        place: among the rows of the chunk that are kept.
        refusal: what else is wrong with the row, if it is used.
    """

    place: int
    source: str
    prompt: str | Conversation
    refusal: str


@dataclass(kw_only=True)
class Scanned:
    """Holds the rows of a chunk of a file.

    Attributes:
        rows: `FIELDS` of those that are kept; `index` counts from the chunk's first.
        seen: rows, kept or not.
        filtered: rows that `data.filter` left out.
        special: rows whose prompt spells special tokens.
        sources: data sources of those that are kept, at most `MOST_SOURCES`.
        tokens: int32, of examples; `tokens_at` counts from the first.
        contents: of examples, as `digested` has them.
        forms: of examples that are tokenised when they are drawn, with the first row of each.
        overlong: examples that were left out.
        same: pairs whose answers are the same.
        refusal: why the row after the last one cannot be used; the chunk's other rows were not looked at.
    """

    rows: Any
    seen: int = 0
    filtered: int = 0
    special: int = 0
    sources: set[str] = field(default_factory=set)
    unsettled: list[Unsettled] = field(default_factory=list)
    tokens: bytes = b""
    contents: bytes = b""
    forms: list[tuple[tuple[Any, ...], Row]] = field(default_factory=list)
    overlong: int = 0
    same: int = 0
    refusal: str = ""


class Placed(NamedTuple):
    """Holds a row, and where it lies; `size` as in `FIELDS`."""

    at: int
    line: int
    size: int
    row: Row


def finder_of(names: Iterable[str]) -> Callable[[str], object]:
    """Return a function that tells whether a text holds one of some names."""
    names = list(names)
    beginnings, search = {name[:2] for name in names}, re.compile("|".join(map(re.escape, names))).search
    return lambda text: any(beginning in text for beginning in beginnings) and search(text)  # few texts hold these


def check_filter(name: str) -> None:
    """Raise ValueError if there is no function that `data.filter` names."""
    if name:
        _FILTERS.check(name)


def bounded(tokenizer: Tokenizer) -> bool:
    """Tell whether `tokenizer` makes at most one token more of ASCII text than the text has characters."""
    characters = [chr(i) for i in range(32, 127)] + ["\n", "\t", "\r", "\r\n"]
    return all(len(tokenizer.encode("a" + 16 * c)) <= 2 + 16 * len(c) for c in characters)


def scan_rows(rows: Iterable[Placed], scan: Scan, stem: str) -> Scanned:
    """Look at some rows: see `Scan.look_at`."""
    fields: list[tuple[int | float, ...]] = []
    out = Scanned(rows=None)
    try:
        for placed in rows:
            out.seen += 1
            if scan.keep is not None and not scan.keep(placed.row):
                out.filtered += 1
                continue
            source = source_of(placed.row.columns, scan.data, stem)
            if len(out.sources) < MOST_SOURCES:
                out.sources.add(source)
            prompt, difficulty, refusal = _look_at(placed.row, scan, source)
            out.special += any(map(scan.spells_special_token, strings_in(prompt)))
            if scan.needs_tokens(prompt):
                out.unsettled.append(Unsettled(len(fields), placed.row.source, prompt, refusal))
            elif refusal:
                raise ValueError(refusal)
            digests = number_of(_bytes_of(prompt)), digest_of(placed.row.columns)
            fields.append((out.seen - 1, 0, placed.at, placed.size, placed.line, *digests, -1, 0, 0, difficulty))
    except ValueError as e:
        out.refusal = str(e)
    out.rows = np.array(fields, dtype=FIELDS)
    return out


def lines_of(source: str | bytes, name: str, start: int, end: int, line: int, what: str) -> Iterator[Placed]:
    """Yield the rows of a stretch of a jsonl file that begins and ends with a line.

    Args:
        source: the file's path, or its bytes.
        line: number of its first line.
    """
    prefix = row_prefix(name)
    with open_lines(source) as f:
        f.seek(start)
        while start < end and (raw := next_line(f, place := f"{prefix}{line}", what)):
            if raw.strip():
                yield Placed(start, line, len(raw), Row(place, parse(raw, place, what)))
            start, line = start + len(raw), line + 1


def open_lines(source: str | bytes) -> BinaryIO:
    """Open a jsonl file by its path, or its bytes; raises OSError."""
    return io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb", buffering=2**20)


def arrow_rows(source: Any, name: str, first: int, last: int, line: int) -> Iterator[Placed]:
    """Yield the rows of some batches of an Arrow file, placed as if all batches before theirs had `BATCH_ROWS` rows.

    Args:
        source: the file's path, or its bytes.
        line: number of the first row.
    """
    import pyarrow

    with pyarrow.ipc.open_file(pyarrow.memory_map(source) if isinstance(source, str) else source) as opened:
        for number in range(first, last):
            for i, columns in enumerate(opened.get_batch(number).to_pylist()):
                yield Placed(number * BATCH_ROWS + i, line, 0, Row(f"{name} row {line}", columns))
                line += 1


def with_answer(columns: Mapping[str, Any], answer_key: str) -> Mapping[str, Any]:
    """Put the reference answer under 'answer' too, where verifiers read it, whatever its column is called."""
    return {**columns, "answer": value_at(columns, answer_key)} if has(columns, answer_key) else columns


def digest_of(columns: Mapping[str, Any]) -> int:
    """Compute `FIELDS.row` of columns: the same however the file writes them."""
    return number_of(as_json(columns).encode())


def as_json(columns: Mapping[str, Any]) -> str:
    """Write columns as JSON, in ASCII. What is null counts as not there, since tables fill such fields in."""
    text = _encode(columns)
    return _encode(without_nulls(columns)) if "null" in text else text


def checks_of(rows: Any) -> Any:
    """Compute [N] uint32, `FIELDS.check` of rows without stored tokens; the crc32 of stored ones is XORed into it.

    Args:
        rows: [N] of `FIELDS`.
    """
    words = np.ascontiguousarray(rows).copy()
    words["check"] = 0
    sums = (words.view("<u8").reshape(len(words), len(_ODD)) * _ODD).sum(1, dtype=np.uint64)
    return (sums ^ sums >> np.uint64(32)).astype(np.uint32)


def source_of(columns: Mapping[str, Any], data: DataConfig, stem: str) -> str:
    """Return the data source that a row names, or else its file's name."""
    named = value_or_none(columns, data.source_key)
    return stem if named is None else str(named)


def _look_at(row: Row, scan: Scan, source: str) -> tuple[str | Conversation, float, str]:
    """Return the row's prompt and difficulty, and why no reward could score a response to it."""
    data = scan.data
    prompt = prompt_of(row, data)
    if data.answer_key != DataConfig().answer_key:  # misspelt, another column called "answer" would be taken for it
        require_column([row], data.answer_key, "data.answer_key")
    difficulty = _difficulty(row, scan.difficulty_key) if scan.difficulty_key else 0.0
    wrong = refusal_of(with_answer(row.columns, data.answer_key), source, scan.scorers)
    return prompt, difficulty, f"{row.source}: {wrong}" if wrong else ""


def _difficulty(row: Row, key: str) -> float:
    require_column([row], key, "data.curriculum")
    value = value_at(row.columns, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{row.source}: data.curriculum sorts by column '{key}', whose {value!r:.40} is no number")
    return float(value)


def _bytes_of(prompt: str | Conversation) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    return _encode(prompt if prompt.tools else prompt.messages).encode()


def _contents(file: str) -> str:
    return hexadecimal(Path(file).read_bytes()) if os.path.isfile(file) else ""


def hexadecimal(raw: bytes) -> str:
    """Digest bytes into 24 hexadecimal digits."""
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


def number_of(raw: bytes) -> int:
    """Digest bytes into a number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")

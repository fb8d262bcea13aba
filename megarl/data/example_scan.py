"""Tokenises rows that come with their answers, once, before a run, or looks at them. Torch-free, for worker processes.

The int32s that are stored of an example whose two sequences have the turns 5 6 | 7 and 5 6 | 8 9:

    2 2  2 1 2 2  5 6 7 5 6 8 9       turns of the first sequence and of the second, tokens of each turn, tokens

Where an example has one sequence, the second has 0 turns.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from megarl.data.encode import TooLong
from megarl.data.examples import Example, Turns
from megarl.data.formats import Format
from megarl.data.messages import strings_in
from megarl.data.readers import Row, value_or_none
from megarl.data.row_looks import OF_ROW, LateTokenizer, RowLooks
from megarl.data.scan import FIELDS, Placed, Scan, Scanned, as_json, finder_of, number_of


@dataclass(frozen=True, kw_only=True)
class ExampleScan(Scan):
    """Holds the rules that rows with answers are tokenised by, or looked at by.

    Attributes:
        format: of the rows.
        tokenizer: pickled for a worker process, it is opened anew there, when it is needed.
        drawn: rows are looked at, and tokenised when they are drawn.
    """

    answers: ClassVar[bool] = True

    format: Format
    tokenizer: LateTokenizer
    drawn: bool = False
    bounded: bool = False
    training: bool = False

    @property
    def read_again(self) -> bool:
        return self.drawn

    @property
    def settings(self) -> list[object]:
        """Return what an index depends on beside files and the tokenizer."""
        names = (*_TEXTS, "margin_key", "label_key", "max_prompt_length", "max_response_length",
                 "filter_overlong_prompts", "truncation", "read_special_tokens")  # fmt: skip
        return [self.format, [[name, getattr(self.data, name)] for name in names], self.drawn]

    @property
    def most_processes(self) -> int:
        """Limit those that tokenise, which have a tokenizer each, and a process that runs its template."""
        return super().most_processes if self.drawn else 8

    def prepare(self) -> None:
        if not self.drawn:
            self.tokenizer.opened  # noqa: B018

    @cached_property
    def looks(self) -> RowLooks:
        """Make the `RowLooks`, which looks at rows without tokenising them."""
        return RowLooks(self.format, self.data, self.tokenizer)

    def settle(self, scanned: Scanned) -> None:
        for form, row in scanned.forms:
            self.looks.accept(form, row)

    def look_at(self, rows: Iterable[Placed], stem: str) -> Scanned:
        """Look at some rows, or tokenise them, one after the other, up to the first that cannot be used."""
        del stem
        out, kept = Scanned(rows=None), _Kept()
        add = self._look_at if self.drawn else self._tokenise
        try:
            for placed in rows:
                out.seen += 1
                add(placed, out, kept)
        except ValueError as e:
            out.refusal = str(e)
        out.rows = np.array(kept.fields, FIELDS)
        out.tokens, out.contents = b"".join(kept.tokens), digested(kept.contents)
        return out

    def _look_at(self, placed: Placed, out: Scanned, kept: _Kept) -> None:
        """Note where a row lies, to be tokenised when it is drawn."""
        written = as_json(placed.row.columns)
        spells = bool(self._may_spell(written)) and self._spells_special_token(placed.row)
        out.special += spells
        example, form = self.looks.look(placed.row, spells_special=spells and not self.data.read_special_tokens)
        if form is not None:
            out.forms.append((form, placed.row))
        out.same += _same(example)
        where = (out.seen - 1, 0, placed.at, placed.size, placed.line)
        kept.fields.append((*where, _prompt_digest(example), number_of(written.encode()), -1, 0, 0, example.label))

    def _tokenise(self, placed: Placed, out: Scanned, kept: _Kept) -> None:
        """Store the tokens of a row, or leave it out as too long."""
        out.special += self._spells_special_token(placed.row)
        try:
            example = OF_ROW[self.format](placed.row, self.data, self.tokenizer.opened)
        except TooLong:
            if not self.data.filter_overlong_prompts:
                raise
            out.overlong += 1
            return
        out.same += _same(example)
        kept.contents.append(example.contents)
        numbers = numbers_of(example)
        raw = numbers.tobytes()
        where, sizes = (out.seen - 1, 0, 0, example.tokens, placed.line), (kept.stored, len(numbers))
        with suppress(ValueError):  # conversations that are the same once their beginnings are cut
            example = replace(example, sequences=self.looks.stand_in(placed.row).sequences)
        kept.fields.append((*where, _prompt_digest(example), 0, *sizes, zlib.crc32(raw), example.label))
        kept.tokens.append(raw)
        kept.stored += len(numbers)

    @cached_property
    def _may_spell(self) -> Callable[[str], object]:
        """Return a function that tells whether columns, as JSON, spell a special token, in a text or elsewhere."""
        return finder_of(json.dumps(name)[1:-1] for name in self.special_tokens)

    def _spells_special_token(self, row: Row) -> bool:
        values = (value_or_none(row.columns, getattr(self.data, key)) for key in _TEXTS)
        return any(self.spells_special_token(text) for value in values for text in strings_in(value))


@dataclass
class _Kept:
    """Holds what is kept of the rows of a chunk: see `Scanned`; `stored` counts the int32s of their tokens."""

    fields: list[tuple[int | float, ...]] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    stored: int = 0


_TEXTS = ("prompt_key", "answer_key", "messages_key", "tools_key", "chosen_key", "rejected_key")


def sequences_of(numbers: Any) -> tuple[Turns, ...]:
    """Return the sequences of an example.

    Args:
        numbers: int32s that are stored of it.
    """
    first, second = (int(count) for count in numbers[:2])
    sizes, end = numbers[2 : 2 + first + second].tolist(), 2 + first + second
    turns: list[tuple[int, ...]] = []
    for size in sizes:
        turns.append(tuple(numbers[end : end + size].tolist()))
        end += size
    return (tuple(turns[:first]), tuple(turns[first:])) if second else (tuple(turns),)


def digested(parts: Iterable[bytes]) -> bytes:
    """Join byte strings, each behind its length, so that a digest tells where one ends."""
    return b"".join(chain.from_iterable((len(part).to_bytes(8, "big"), part) for part in parts))


def numbers_of(example: Example) -> Any:
    """Return the int32s that are stored of an example."""
    return np.fromiter(_numbers_of(example), "<i4")


def _numbers_of(example: Example) -> Iterator[int]:
    turns = [turn for sequence in example.sequences for turn in sequence]
    first, *more = (len(sequence) for sequence in example.sequences)
    yield from (first, *(more or [0]))
    yield from map(len, turns)
    yield from chain.from_iterable(turns)


def _prompt_digest(example: Example) -> int:
    """Compute `FIELDS.prompt` of an example from its sequences, or from what stands for them."""
    return number_of(repr(example.sequences).encode())


def _same(example: Example) -> bool:
    return len(example.sequences) == 2 and example.sequences[0] == example.sequences[1]

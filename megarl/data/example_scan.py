"""Tokenises rows that come with their answers, once, before a run. Torch-free, for worker processes.

The int32s that are stored of an example whose two sequences have the turns 5 6 | 7 and 5 6 | 8 9:

    2 2  2 1 2 2  5 6 7 5 6 8 9       turns of the first sequence and of the second, tokens of each turn, tokens

Where an example has one sequence, the second has 0 turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from megarl.config.data import DataConfig
from megarl.data.demonstrations import demonstration, judged
from megarl.data.encode import TooLong
from megarl.data.examples import Example, Turns
from megarl.data.formats import Format
from megarl.data.messages import strings_in
from megarl.data.preferences import preference
from megarl.data.readers import Row, value_or_none
from megarl.data.scan import FIELDS, Placed, Scan, Scanned, number_of
from megarl.data.tokenizer import Tokenizer

_OF_ROW: Mapping[Format, Callable[[Row, DataConfig, Tokenizer], Example]] = {
    "demonstrations": demonstration,
    "preferences": preference,
    "judged": judged,
}


@dataclass(frozen=True, kw_only=True)
class ExampleScan(Scan):
    """The rules that rows with answers are tokenised by.

    Attributes:
        format: of the rows.
        tokenizer: pickled for a worker process, it is opened anew there.
    """

    answers: ClassVar[bool] = True

    format: Format
    tokenizer: Tokenizer
    bounded: bool = False
    training: bool = False

    @property
    def settings(self) -> list[object]:
        """Holds what an index depends on beside files and the tokenizer."""
        names = (*_TEXTS, "margin_key", "label_key", "max_prompt_length", "max_response_length",
                 "filter_overlong_prompts", "truncation", "read_special_tokens")  # fmt: skip
        return [self.format, [[name, getattr(self.data, name)] for name in names]]

    def look_at(self, rows: Iterable[Placed], stem: str) -> Scanned:
        """Tokenise some rows, one after the other, up to the first that cannot be used."""
        del stem
        out, stored = Scanned(rows=None), 0
        fields: list[tuple[int | float, ...]] = []
        tokens: list[bytes] = []
        contents: list[bytes] = []
        try:
            for placed in rows:
                out.seen += 1
                out.special += self._spells_special_token(placed.row)
                try:
                    example = _OF_ROW[self.format](placed.row, self.data, self.tokenizer)
                except TooLong:
                    if not self.data.filter_overlong_prompts:
                        raise
                    out.overlong += 1
                    continue
                out.same += len(example.sequences) == 2 and example.sequences[0] == example.sequences[1]
                numbers = np.fromiter(_numbers_of(example), "<i4")
                raw = numbers.tobytes()
                where, sizes = (out.seen - 1, 0, 0, example.tokens, placed.line), (stored, len(numbers))
                fields.append((*where, number_of(raw), 0, *sizes, zlib.crc32(raw), example.label))
                tokens.append(raw)
                contents.append(example.contents)
                stored += len(numbers)
        except ValueError as e:
            out.refusal = str(e)
        out.rows, out.tokens, out.contents = np.array(fields, FIELDS), b"".join(tokens), digested(contents)
        return out

    def _spells_special_token(self, row: Row) -> bool:
        values = (value_or_none(row.columns, getattr(self.data, key)) for key in _TEXTS)
        return any(self.spells_special_token(text) for value in values for text in strings_in(value))


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


def _numbers_of(example: Example) -> Iterator[int]:
    turns = [turn for sequence in example.sequences for turn in sequence]
    first, *more = (len(sequence) for sequence in example.sequences)
    yield from (first, *(more or [0]))
    yield from map(len, turns)
    yield from chain.from_iterable(turns)

"""Holds the examples of a run: tokenised once, mapped by all ranks; of large files, tokenised when they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.config.data import DataConfig
from megarl.data.encode import TooLong, special_remark
from megarl.data.example_scan import ExampleScan, numbers_of, sequences_of
from megarl.data.examples import Example
from megarl.data.files import data_files, row_prefix
from megarl.data.formats import SEQUENCES, Format
from megarl.data.index_cache import index_of
from megarl.data.prompt_sampler import Fits
from megarl.data.readers import Row
from megarl.data.row_files import RowRefused
from megarl.data.row_index import Index
from megarl.data.row_looks import OF_ROW, LateTokenizer
from megarl.data.row_set import RowSet
from megarl.data.tokenizer import Tokenizer

SMALL_BYTES = 2**20
"""Files up to this size together are looked at, or tokenised, by every process for itself, in about a second."""

LATER_BYTES = 64 * 2**20
"""Training rows of files over this size together are tokenised when drawn, if those that are too long are left out."""

TRIED = 256
"""Rows of such files that are tokenised before the run, to see how many are too long."""

HELD_NUMBERS = 2**24
"""Of rows that were tokenised to see whether they are too long, until they are read: 64 MiB."""


def load_examples(
    data: DataConfig,
    format: Format,
    files: Sequence[str],
    tokenizer: Tokenizer,
    what: str = "data.train_files",
    *,
    tokenizer_key: str = "",
) -> ExampleSet:
    """Tokenise the examples of some files, one per row, or map those that were tokenised before.

    Training rows of more than `LATER_BYTES` are only looked at, with `data.filter_overlong_prompts`.

    Args:
        data: column names and lengths; rows that are too long are dropped with `data.filter_overlong_prompts`.
        what: the key that names the files, for messages.
        tokenizer_key: tells tokenizers apart: without it, nothing is kept.

    Raises:
        ValueError: unreadable files, a row that cannot be used, or no row left after filtering.
    """
    sources = data_files(files, what)
    large = what != "data.val_files" and sum(file.size for file in sources) > LATER_BYTES
    drawn = large and data.filter_overlong_prompts
    scan = ExampleScan(
        what=what,
        data=data,
        special_tokens=tuple(tokenizer.special_tokens),
        format=format,
        tokenizer=LateTokenizer(tokenizer),
        drawn=drawn,
        hint="data.filter_overlong_prompts=true has rows tokenised when they are drawn" if large and not drawn else "",
    )
    index = index_of(sources, scan, tokenizer, tokenizer_key=tokenizer_key, small_bytes=SMALL_BYTES)
    if not len(index.rows):
        prompt, response = _limits(data)
        raise ValueError(f"{what}: none of the {index.seen} rows keeps to {prompt} and {response} tokens")
    return ExampleSet(index, scan, tokenizer)


class ExampleSet(RowSet[Example]):
    """Holds the examples of some files, in their order. Only those that are drawn become Python objects.

    Attributes:
        drawn: they are tokenised when they are drawn, so that some may be too long, which `fits` tells.
    """

    def __init__(self, index: Index, scan: ExampleScan, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ValueError: a row that is tried cannot be used, or all that are tried are too long.
        """
        super().__init__(index, _remarks(index, scan), reads_files=scan.drawn)
        self.drawn, self._scan, self._tokenizer = scan.drawn, scan, tokenizer
        self._held: dict[int, tuple[Any, float]] = {}  # numbers and label of rows that fit, by their place
        self._held_numbers = 0
        if self.drawn:
            self.remarks += self._try_some()

    def fits(self, i: int) -> bool:
        """Return whether an example keeps to the limits; one that does is held until it is read.

        Raises:
            RowRefused: the row cannot be used.
        """
        if not self.drawn or i in self._held:
            return True
        try:
            example = self._tokenised(self._index.rows[i])
        except TooLong:
            return False
        except ValueError as e:
            raise _refused(e) from e
        self._hold(i, example)
        return True

    @property
    def sequences(self) -> int:
        """Count the sequences of each example."""
        return SEQUENCES[self._scan.format]

    @property
    def longest(self) -> Example:
        """Return the first example of the most tokens; it is unknown for rows that are tokenised when drawn."""
        assert not self.drawn
        return self[int(np.argmax(self._index.rows["size"]))]

    def _read(self, fields: Any) -> Example:
        if self.drawn:
            return self._read_drawn(fields)
        sequences = sequences_of(self._index.stored(fields))
        return Example(sequences=sequences, label=float(fields["value"]), source=self._source(fields))

    def _read_drawn(self, fields: Any) -> Example:
        numbers, label = self._held.pop(int(fields["index"]), (None, 0.0))
        if numbers is not None:
            self._held_numbers -= len(numbers)
            return Example(sequences=sequences_of(numbers), label=label, source=self._source(fields))
        try:
            return self._tokenised(fields)
        except ValueError as e:
            raise _refused(e) from e

    def _source(self, fields: Any) -> str:
        name, *_ = self._index.files[int(fields["file"])]
        return f"{row_prefix(name)}{fields['line']}"

    def _tokenised(self, fields: Any) -> Example:
        row = Row(*self._source_and_columns(fields))
        return OF_ROW[self._scan.format](row, self._scan.data, self._tokenizer)

    def _hold(self, i: int, example: Example) -> None:
        numbers = numbers_of(example)
        self._held[i] = numbers, example.label
        self._held_numbers += len(numbers)
        while self._held_numbers > HELD_NUMBERS:
            oldest, _ = self._held.pop(next(iter(self._held)))
            self._held_numbers -= len(oldest)

    def _try_some(self) -> tuple[str, ...]:
        """Tokenise rows from the first to the last, as far apart as can be; remark on those that are too long."""
        tried, overlong = np.linspace(0, len(self) - 1, min(TRIED, len(self))).astype(int), 0
        for i in tried.tolist():
            try:
                self._tokenised(self._index.rows[i])
            except TooLong:
                overlong += 1
        what, count = self._scan.what, len(tried)
        if overlong == count:
            limits = " and ".join(_limits(self._scan.data))
            raise ValueError(f"{what}: none of the {count} rows that were tried keeps to {limits} tokens")
        if not overlong:
            return ()
        return (
            f"remark: {what}: {overlong} of {count} rows that were tried are over {_limit(self._scan)} tokens; such "
            f"rows are left out when they are drawn",
        )


def fits_of(examples: Sequence[Example]) -> Fits | None:
    """Return the function that tells a sampler which examples are not too long; None if all were checked before."""
    if not isinstance(examples, ExampleSet) or not examples.drawn:
        return None
    return lambda rows: list(map(examples.fits, rows))


def _refused(error: ValueError) -> RowRefused:
    return RowRefused(
        f"{error}; it was looked at and not tokenised before it was drawn: mend it and go on with "
        f"trainer.resume_allow=[data]"
    )


def _limits(data: DataConfig) -> tuple[str, str]:
    return (
        f"data.max_prompt_length = {data.max_prompt_length}",
        f"data.max_response_length = {data.max_response_length}",
    )


def _limit(scan: ExampleScan) -> str:
    data = scan.data
    if data.messages_key and scan.format == "demonstrations":
        return f"data.max_prompt_length + data.max_response_length = {data.max_sequence_length}"
    return " or ".join(_limits(data))


def _remarks(index: Index, scan: ExampleScan) -> tuple[str, ...]:
    what, data = scan.what, scan.data
    remarks = (*special_remark(what, index.special, index.seen, data), *_nothing_to_learn(index, scan))
    if not index.overlong:
        return remarks
    left_out = f"{index.overlong} of {index.seen} rows left out: {index.overlong} over {_limit(scan)} tokens"
    return (f"{what}: {left_out}", *remarks)


def _nothing_to_learn(index: Index, scan: ExampleScan) -> tuple[str, ...]:
    """Write the remark on pairs with the same answer twice, or on labels that are all the same: they teach nothing."""
    if index.same:
        return (f"remark: {scan.what}: in {index.same} of {len(index.rows)} pairs chosen and rejected are the same",)
    labels = np.unique(index.rows["value"]).tolist() if scan.format == "judged" else []
    if len(labels) == 1:
        count, label = len(index.rows), f"{labels[0]:g}"
        return (f"remark: {scan.what}: all {count} answers have the label {label}; the other one is missing",)
    return ()

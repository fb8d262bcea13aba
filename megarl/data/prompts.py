"""Holds the prompts of a run: rows that lie on disk, each of which is an object only while it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.config.data import DataConfig
from megarl.data.curriculum import load_curriculum
from megarl.data.encode import prompt_ids, special_remark
from megarl.data.files import data_files, stem_of
from megarl.data.index_cache import index_of
from megarl.data.readers import Row
from megarl.data.row_index import Index
from megarl.data.row_set import RowSet
from megarl.data.scan import Scan, bounded, check_filter, source_of, with_answer
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.parts import Scorers
from megarl.types import Prompt

SMALL_BYTES = 16 * 2**20
"""Files up to this size together are read by every process for itself: nothing is written for them."""


def load_prompts(
    data: DataConfig,
    files: Sequence[str],
    tokenizer: Tokenizer,
    what: str = "data.train_files",
    *,
    scorers: Scorers = (),
    tokenizer_key: str = "",
) -> PromptSet:
    """Look at every row of some files, and return their prompts, of at most `data.max_prompt_length` tokens each.

    Args:
        data: column names, lengths and what happens to a prompt that is too long.
        files: data.train_files or data.val_files.
        what: which of the two, for messages.
        scorers: that must be able to score a response to each of them.
        tokenizer_key: tells tokenizers apart: without it, nothing that depends on one is kept.

    Raises:
        ValueError: unreadable files, a missing column, a prompt that is no text, empty or (truncation=error) too
            long, a row that the reward refuses, or no prompt left after filtering.
    """
    training = what == "data.train_files"
    scan = Scan(
        what=what,
        data=data,
        bounded=bounded(tokenizer),
        scorers=scorers,
        training=training,
        special_tokens=tuple(tokenizer.special_tokens),
    )
    _check_keys(scan)
    if data.source and training:
        if files:
            raise ValueError("data.source and data.train_files both name the training rows; leave one of them out")
        scan, sources = replace(scan, what="data.source"), []
    else:
        sources = data_files(files, what)
    index = index_of(sources, scan, tokenizer, tokenizer_key=tokenizer_key, small_bytes=SMALL_BYTES)
    if not len(index.rows):
        raise ValueError(_none_left(index, scan))
    prompts = PromptSet(index, scan, tokenizer)
    if training and data.weights and 0 in prompts.sizes:
        number = prompts.sizes.index(0) + 1
        raise ValueError(f"data.weights: entry {number} of data.train_files has no rows of its own to draw from")
    return prompts


class PromptSet(RowSet[Prompt]):
    """Holds the prompts of some files, in their order. Only the rows that are drawn become Python objects."""

    def __init__(self, index: Index, scan: Scan, tokenizer: Tokenizer) -> None:
        super().__init__(index, _remarks(index, scan))
        self._scan, self._data, self._tokenizer = scan, scan.data, tokenizer
        self._stems = [stem_of(name) for name, *_ in index.files]

    def row(self, i: int) -> Row:
        """Read a row, without its tokens."""
        return self._row(self._index.rows[i])

    @property
    def checked_for(self) -> Scorers:
        """Return the scorers that can score responses to all prompts."""
        return self._scan.scorers

    @property
    def sources(self) -> set[str]:
        """Return the data sources of the prompts."""
        return self._index.sources

    @property
    def sizes(self) -> list[int]:
        """Count the rows of each entry of data.train_files."""
        entries = np.array([entry for _, entry, _, _ in self._index.files])
        counts = np.bincount(self._index.rows["file"], minlength=len(entries))
        sizes: list[int] = np.bincount(entries, counts, len(self._data.train_files)).astype(int).tolist()
        return sizes

    @property
    def difficulty(self) -> Any:
        """Return the column that `data.curriculum` names, [N] float64."""
        return self._index.rows["value"]

    def _row(self, fields: Any) -> Row:
        source, columns = self._source_and_columns(fields)
        return Row(source, with_answer(columns, self._data.answer_key))

    def _read(self, fields: Any) -> Prompt:
        row, ids = self._row(fields), tuple(self._index.stored(fields).tolist())
        ids = ids or prompt_ids(row, self._data, self._tokenizer)
        where = source_of(row.columns, self._data, self._stems[int(fields["file"])])
        return Prompt(index=int(fields["index"]), token_ids=ids, row=row.columns, source=row.source, data_source=where)


def _check_keys(scan: Scan) -> None:
    """Check the keys about training rows; a file of the user that one names is imported here."""
    data = scan.data
    if not scan.training:
        return
    if data.weights and data.source:
        raise ValueError("data.weights weighs the entries of data.train_files, which data.source stands for")
    if data.weights and len(data.weights) != len(data.train_files):
        raise ValueError(
            f"data.weights has {len(data.weights)} numbers for {len(data.train_files)} entries of data.train_files"
        )
    if data.weights and data.curriculum:
        raise ValueError("data.curriculum orders all rows, data.weights draws from each file; leave one of them out")
    check_filter(data.filter)
    load_curriculum(data.curriculum)


def _remarks(index: Index, scan: Scan) -> tuple[str, ...]:
    reasons = {
        f"over data.max_prompt_length = {scan.data.max_prompt_length} tokens": index.overlong,
        "by data.filter": index.filtered,
        "whose prompt an earlier row has": index.duplicates,
    }
    left_out = [f"{count} {reason}" for reason, count in reasons.items() if count]
    remarks = special_remark(scan.what, index.special, index.seen, scan.data)
    if scan.what == "data.source":
        remarks += (
            f"data.source: {index.seen} rows, as {scan.data.source} gave them when it was asked once; it is asked "
            f"again when its file or its attribute `version` changes",
        )
    if not left_out:
        return remarks
    return (
        *remarks,
        f"{scan.what}: {index.seen - len(index.rows)} of {index.seen} rows left out: {', '.join(left_out)}",
    )


def _none_left(index: Index, scan: Scan) -> str:
    limit = scan.data.max_prompt_length
    if index.filtered:
        return f"{scan.what}: data.filter and data.max_prompt_length = {limit} leave none of the {index.seen} prompts"
    return f"{scan.what}: none of the {index.seen} prompts has at most data.max_prompt_length = {limit} tokens"

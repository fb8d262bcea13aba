"""The examples of a run: tokenised once, mapped by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.config.data import DataConfig
from megarl.data.encode import special_remark
from megarl.data.example_scan import ExampleScan, sequences_of
from megarl.data.examples import Example
from megarl.data.files import data_files, row_prefix
from megarl.data.formats import Format
from megarl.data.index_cache import index_of
from megarl.data.row_index import Index
from megarl.data.row_set import RowSet
from megarl.data.tokenizer import Tokenizer

SMALL_BYTES = 2**20
"""Files up to this size together are tokenised by every process for itself, in about a second."""


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

    Args:
        data: column names and lengths; rows that are too long are dropped with `data.filter_overlong_prompts`.
        what: the key that names the files, for messages.
        tokenizer_key: tells tokenizers apart: without it, nothing is kept.

    Raises:
        ValueError: unreadable files, a row that cannot be used, or no row left after filtering.
    """
    special = tuple(tokenizer.special_tokens)
    rules = ExampleScan(what=what, data=data, special_tokens=special, format=format, tokenizer=tokenizer)
    sources = data_files(files, what)
    index = index_of(sources, rules, tokenizer, tokenizer_key=tokenizer_key, small_bytes=SMALL_BYTES)
    if not len(index.rows):
        prompt, response = _limits(data)
        raise ValueError(f"{what}: none of the {index.seen} rows keeps to {prompt} and {response} tokens")
    return ExampleSet(index, _remarks(index, rules))


class ExampleSet(RowSet[Example]):
    """The examples of some files, in their order. Only those that are drawn become Python objects."""

    @property
    def longest(self) -> Example:
        """The first of those that have the most tokens."""
        return self[int(np.argmax(self._index.rows["size"]))]

    def _read(self, fields: Any) -> Example:
        sequences = sequences_of(self._index.stored(fields))
        name, *_ = self._index.files[int(fields["file"])]
        source = f"{row_prefix(name)}{fields['line']}"
        return Example(sequences=sequences, label=float(fields["value"]), source=source)


def _limits(data: DataConfig) -> tuple[str, str]:
    return (
        f"data.max_prompt_length = {data.max_prompt_length}",
        f"data.max_response_length = {data.max_response_length}",
    )


def _remarks(index: Index, rules: ExampleScan) -> tuple[str, ...]:
    what, data = rules.what, rules.data
    remarks = (*special_remark(what, index.special, index.seen, data), *_nothing_to_learn(index, rules))
    if not index.overlong:
        return remarks
    limit = " or ".join(_limits(data))
    if data.messages_key and rules.format == "demonstrations":
        limit = f"data.max_prompt_length + data.max_response_length = {data.max_sequence_length}"
    left_out = f"{index.overlong} of {index.seen} rows left out: {index.overlong} over {limit} tokens"
    return (f"{what}: {left_out}", *remarks)


def _nothing_to_learn(index: Index, rules: ExampleScan) -> tuple[str, ...]:
    """Remark on rows that teach nothing, of a format whose rows only together teach something."""
    if index.same:
        return (f"remark: {rules.what}: in {index.same} of {len(index.rows)} pairs chosen and rejected are the same",)
    labels = np.unique(index.rows["value"]).tolist() if rules.format == "judged" else []
    if len(labels) == 1:
        count, label = len(index.rows), f"{labels[0]:g}"
        return (f"remark: {rules.what}: all {count} answers have the label {label}; the other one is missing",)
    return ()

"""The prompts of a run: rows that lie on disk, one of which is an object while it is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from megarl.config.data import Data
from megarl.data.curriculum import load_curriculum
from megarl.data.encode import prompt_ids, special_remark
from megarl.data.files import DataFile, data_files, stem_of
from megarl.data.prompt_index import Index, TooLarge, make_index, meta_of_index, open_index
from megarl.data.readers import Row
from megarl.data.row_cache import Progress, cache_folder, entry, meta_of
from megarl.data.row_files import check_fields, open_file
from megarl.data.scan import Scan, bounded, check_filter, source_of, with_answer
from megarl.data.source import source_version
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.parts import Scorers
from megarl.types import Prompt

SMALL_BYTES = 16 * 2**20
"""Files up to this size together are read by every process for itself: nothing is written for them."""

OPEN_FILES = 64
"""At a time: there may be more files of rows than a process can have open."""

_FORMAT = 4  # of an index: those of another one are made again


def load_prompts(
    data: Data,
    files: Sequence[str],
    tokenizer: Tokenizer,
    what: str = "data.train_files",
    *,
    scorers: Scorers = (),
    tokenizer_key: str = "",
) -> PromptSet:
    """The prompts of some files, every row of which is looked at before a run: at most `data.max_prompt_length` tokens.

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
    asked = Scan(
        what=what,
        data=data,
        bounded=bounded(tokenizer),
        scorers=scorers,
        training=training,
        special_tokens=tuple(tokenizer.special_tokens),
    )
    _check_keys(asked)
    if data.source and training:
        if files:
            raise ValueError("data.source and data.train_files both name the training rows; leave one of them out")
        asked, found = replace(asked, what="data.source"), []
    else:
        found = data_files(files, what)
    small = bool(found) and not any(f.remote for f in found) and sum(f.size for f in found) <= SMALL_BYTES
    if small or not tokenizer_key:
        if not small and (not found or any(file.remote for file in found)):
            raise ValueError(f"{asked.what}: rows that have to be kept need a tokenizer that is known by its files")
        try:
            index = make_index(found, asked, tokenizer, None, lambda: None)
        except TooLarge:
            if not tokenizer_key:
                raise
            index = _kept_index(found, asked, tokenizer, tokenizer_key)
    else:
        index = _kept_index(found, asked, tokenizer, tokenizer_key)
    if not len(index.rows):
        raise ValueError(_none_left(index, asked))
    prompts = PromptSet(index, asked, tokenizer)
    if training and data.weights and 0 in prompts.sizes:
        number = prompts.sizes.index(0) + 1
        raise ValueError(f"data.weights: entry {number} of data.train_files has no rows of its own to draw from")
    return prompts


class PromptSet(Sequence[Prompt]):
    """The prompts of some files, in their order. Only the rows that are drawn become Python objects.

    Attributes:
        remarks: what was left out, for the start of the run.
    """

    def __init__(self, index: Index, asked: Scan, tokenizer: Tokenizer) -> None:
        self._index, self._asked, self._data, self._tokenizer = index, asked, asked.data, tokenizer
        self._file = lru_cache(OPEN_FILES)(lambda number: open_file(*index.files[number]))
        for number in range(min(len(index.files), OPEN_FILES)):  # what replaces one of these is not read
            self._file(number)
        self._stems = [stem_of(name) for name, *_ in index.files]
        self.remarks = _remarks(index, asked)

    def __len__(self) -> int:
        return len(self._index.rows)

    @overload
    def __getitem__(self, i: int) -> Prompt: ...
    @overload
    def __getitem__(self, i: slice) -> list[Prompt]: ...
    def __getitem__(self, i: int | slice) -> Prompt | list[Prompt]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self._prompt(self._index.rows[i])

    def row(self, i: int) -> Row:
        """Without its tokens."""
        return self._row(self._index.rows[i])

    @property
    def digest(self) -> str:
        """Of the rows and of what makes prompts of them, in order; known since they were looked at."""
        return self._index.digest

    @property
    def checked_for(self) -> Scorers:
        """What can score responses to all of them."""
        return self._asked.scorers

    @property
    def sources(self) -> set[str]:
        """Their data sources."""
        return self._index.sources

    @property
    def sizes(self) -> list[int]:
        """How many there are of each entry of data.train_files."""
        entries = np.array([entry for _, entry, _, _ in self._index.files])
        counts = np.bincount(self._index.rows["file"], minlength=len(entries))
        sizes: list[int] = np.bincount(entries, counts, len(self._data.train_files)).astype(int).tolist()
        return sizes

    @property
    def difficulty(self) -> Any:
        """[N] float64: the column that `data.curriculum` names."""
        return self._index.rows["difficulty"]

    def in_common(self, other: PromptSet) -> int:
        """How many of these the other set has too."""
        own, step = np.unique(self._index.rows["prompt"]), 2**16
        there = np.zeros(len(own), bool)
        for i in range(0, len(other), step):
            block = other._index.rows["prompt"][i : i + step]
            place = np.minimum(np.searchsorted(own, block), len(own) - 1)
            there[place[own[place] == block]] = True
        return int(np.isin(self._index.rows["prompt"], own[there]).sum())

    def _tokens(self, fields: Any) -> Any:
        """Those that are stored for a row."""
        at = int(fields["tokens_at"])
        return self._index.tokens[at : at + int(fields["tokens"])] if at >= 0 else self._index.tokens[:0]

    def _row(self, fields: Any) -> Row:
        check_fields(fields, self._tokens(fields), self._index.folder)
        source, columns = self._file(int(fields["file"])).read(fields)
        return Row(source, with_answer(columns, self._data.answer_key))

    def _prompt(self, fields: Any) -> Prompt:
        row, ids = self._row(fields), tuple(self._tokens(fields).tolist())
        ids = ids or prompt_ids(row, self._data, self._tokenizer)
        where = source_of(row.columns, self._data, self._stems[int(fields["file"])])
        return Prompt(index=int(fields["index"]), token_ids=ids, row=row.columns, source=row.source, data_source=where)


def _kept_index(found: list[DataFile], asked: Scan, tokenizer: Tokenizer, tokenizer_key: str) -> Index:
    """From the cache, where it is put first if it is not there."""

    def make(folder: Path, progress: Progress) -> dict[str, object]:
        return meta_of_index(make_index(found, asked, tokenizer, folder, progress))

    where = cache_folder(asked.data.cache_dir)
    folder = entry(where, _key(found, asked, tokenizer_key), asked.what, make)
    try:
        return open_index(folder, meta_of(folder))
    except OSError as e:
        raise ValueError(f"{asked.what}: '{folder}' cannot be read: {e.strerror or e}; remove it") from e


def _key(found: list[DataFile], asked: Scan, tokenizer_key: str) -> str:
    """Of everything that an index depends on."""
    data = asked.data
    names = ("prompt_key", "answer_key", "source_key", "tools_key", "max_prompt_length", "filter_overlong_prompts",
             "truncation", "read_special_tokens")  # fmt: skip
    training = ("filter", "drop_duplicates", "curriculum", "source") if asked.training else ()
    code = [data.filter, data.curriculum, data.source] if asked.training else []
    parts = [
        [_FORMAT, asked.what, asked.scorers, tokenizer_key],
        [[f.place if f.remote else os.path.abspath(f.place), f.entry, f.size, f.changed] for f in found],
        [[name, getattr(data, name)] for name in (*names, *training)],
        [_contents(value.rpartition(":")[0]) for value in [*code, *(name for name, *_ in asked.scorers)]],
        source_version(data.source) if asked.training and data.source else "",
    ]
    return _hexadecimal(json.dumps(parts).encode())


def _contents(file: str) -> str:
    return _hexadecimal(Path(file).read_bytes()) if os.path.isfile(file) else ""


def _hexadecimal(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


def _check_keys(asked: Scan) -> None:
    """What the section says of the training rows; a user's file that is named is imported here, once."""
    data = asked.data
    if not asked.training:
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


def _remarks(index: Index, asked: Scan) -> tuple[str, ...]:
    reasons = {
        f"over data.max_prompt_length = {asked.data.max_prompt_length} tokens": index.overlong,
        "by data.filter": index.filtered,
        "whose prompt an earlier row has": index.duplicates,
    }
    said = [f"{count} {reason}" for reason, count in reasons.items() if count]
    found = special_remark(asked.what, index.special, index.seen, asked.data)
    if asked.what == "data.source":
        found += (
            f"data.source: {index.seen} rows, as {asked.data.source} gave them when it was asked once; it is asked "
            f"again when its file or its attribute `version` changes",
        )
    if not said:
        return found
    return (*found, f"{asked.what}: {index.seen - len(index.rows)} of {index.seen} rows left out: {', '.join(said)}")


def _none_left(index: Index, asked: Scan) -> str:
    limit = asked.data.max_prompt_length
    if index.filtered:
        return f"{asked.what}: data.filter and data.max_prompt_length = {limit} leave none of the {index.seen} prompts"
    return f"{asked.what}: none of the {index.seen} prompts has at most data.max_prompt_length = {limit} tokens"

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

from megarl.config.data import DataConfig
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
    rules = Scan(
        what=what,
        data=data,
        bounded=bounded(tokenizer),
        scorers=scorers,
        training=training,
        special_tokens=tuple(tokenizer.special_tokens),
    )
    _check_keys(rules)
    if data.source and training:
        if files:
            raise ValueError("data.source and data.train_files both name the training rows; leave one of them out")
        rules, sources = replace(rules, what="data.source"), []
    else:
        sources = data_files(files, what)
    small = bool(sources) and not any(f.remote for f in sources) and sum(f.size for f in sources) <= SMALL_BYTES
    if small or not tokenizer_key:
        if not small and (not sources or any(file.remote for file in sources)):
            raise ValueError(f"{rules.what}: rows that have to be kept need a tokenizer that is known by its files")
        try:
            index = make_index(sources, rules, tokenizer, None, lambda: None)
        except TooLarge:
            if not tokenizer_key:
                raise
            index = _kept_index(sources, rules, tokenizer, tokenizer_key)
    else:
        index = _kept_index(sources, rules, tokenizer, tokenizer_key)
    if not len(index.rows):
        raise ValueError(_none_left(index, rules))
    prompts = PromptSet(index, rules, tokenizer)
    if training and data.weights and 0 in prompts.sizes:
        number = prompts.sizes.index(0) + 1
        raise ValueError(f"data.weights: entry {number} of data.train_files has no rows of its own to draw from")
    return prompts


class PromptSet(Sequence[Prompt]):
    """The prompts of some files, in their order. Only the rows that are drawn become Python objects.

    Attributes:
        remarks: what was left out, for the start of the run.
    """

    def __init__(self, index: Index, rules: Scan, tokenizer: Tokenizer) -> None:
        self._index, self._rules, self._data, self._tokenizer = index, rules, rules.data, tokenizer
        self._file = lru_cache(OPEN_FILES)(lambda number: open_file(*index.files[number]))
        for number in range(min(len(index.files), OPEN_FILES)):  # what replaces one of these is not read
            self._file(number)
        self._stems = [stem_of(name) for name, *_ in index.files]
        self.remarks = _remarks(index, rules)

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
        """Read a row, without its tokens."""
        return self._row(self._index.rows[i])

    @property
    def digest(self) -> str:
        """The digest of the rows and of what makes prompts of them, in order; known since they were looked at."""
        return self._index.digest

    @property
    def checked_for(self) -> Scorers:
        """The scorers that can score responses to all of them."""
        return self._rules.scorers

    @property
    def sources(self) -> set[str]:
        """Their data sources."""
        return self._index.sources

    @property
    def sizes(self) -> list[int]:
        """Rows of each entry of data.train_files."""
        entries = np.array([entry for _, entry, _, _ in self._index.files])
        counts = np.bincount(self._index.rows["file"], minlength=len(entries))
        sizes: list[int] = np.bincount(entries, counts, len(self._data.train_files)).astype(int).tolist()
        return sizes

    @property
    def difficulty(self) -> Any:
        """[N] float64: the column that `data.curriculum` names."""
        return self._index.rows["difficulty"]

    def in_common(self, other: PromptSet) -> int:
        """Count the prompts that the other set has too."""
        prompts, step = np.unique(self._index.rows["prompt"]), 2**16
        there = np.zeros(len(prompts), bool)
        for i in range(0, len(other), step):
            block = other._index.rows["prompt"][i : i + step]
            place = np.minimum(np.searchsorted(prompts, block), len(prompts) - 1)
            there[place[prompts[place] == block]] = True
        return int(np.isin(self._index.rows["prompt"], prompts[there]).sum())

    def _tokens(self, fields: Any) -> Any:
        """Return the tokens that are stored for a row; none if it was not tokenised."""
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


def _kept_index(sources: list[DataFile], rules: Scan, tokenizer: Tokenizer, tokenizer_key: str) -> Index:
    """Open the index in the cache, where it is put first if it is not there."""

    def make(folder: Path, progress: Progress) -> dict[str, object]:
        return meta_of_index(make_index(sources, rules, tokenizer, folder, progress))

    where = cache_folder(rules.data.cache_dir)
    folder = entry(where, _key(sources, rules, tokenizer_key), rules.what, make)
    try:
        return open_index(folder, meta_of(folder))
    except OSError as e:
        raise ValueError(f"{rules.what}: '{folder}' cannot be read: {e.strerror or e}; remove it") from e


def _key(sources: list[DataFile], rules: Scan, tokenizer_key: str) -> str:
    """Hash everything that an index depends on."""
    data = rules.data
    names = ("prompt_key", "answer_key", "source_key", "tools_key", "max_prompt_length", "filter_overlong_prompts",
             "truncation", "read_special_tokens")  # fmt: skip
    training = ("filter", "drop_duplicates", "curriculum", "source") if rules.training else ()
    code = [data.filter, data.curriculum, data.source] if rules.training else []
    parts = [
        [_FORMAT, rules.what, rules.scorers, tokenizer_key],
        [[f.place if f.remote else os.path.abspath(f.place), f.entry, f.size, f.changed] for f in sources],
        [[name, getattr(data, name)] for name in (*names, *training)],
        [_contents(value.rpartition(":")[0]) for value in [*code, *(name for name, *_ in rules.scorers)]],
        source_version(data.source) if rules.training and data.source else "",
    ]
    return _hexadecimal(json.dumps(parts).encode())


def _contents(file: str) -> str:
    return _hexadecimal(Path(file).read_bytes()) if os.path.isfile(file) else ""


def _hexadecimal(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


def _check_keys(rules: Scan) -> None:
    """Check the keys about training rows; a file of the user that one names is imported here."""
    data = rules.data
    if not rules.training:
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


def _remarks(index: Index, rules: Scan) -> tuple[str, ...]:
    reasons = {
        f"over data.max_prompt_length = {rules.data.max_prompt_length} tokens": index.overlong,
        "by data.filter": index.filtered,
        "whose prompt an earlier row has": index.duplicates,
    }
    left_out = [f"{count} {reason}" for reason, count in reasons.items() if count]
    remarks = special_remark(rules.what, index.special, index.seen, rules.data)
    if rules.what == "data.source":
        remarks += (
            f"data.source: {index.seen} rows, as {rules.data.source} gave them when it was asked once; it is asked "
            f"again when its file or its attribute `version` changes",
        )
    if not left_out:
        return remarks
    return (
        *remarks,
        f"{rules.what}: {index.seen - len(index.rows)} of {index.seen} rows left out: {', '.join(left_out)}",
    )


def _none_left(index: Index, rules: Scan) -> str:
    limit = rules.data.max_prompt_length
    if index.filtered:
        return f"{rules.what}: data.filter and data.max_prompt_length = {limit} leave none of the {index.seen} prompts"
    return f"{rules.what}: none of the {index.seen} prompts has at most data.max_prompt_length = {limit} tokens"

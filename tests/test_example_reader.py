"""Each row of a step's examples is read by one rank; together the ranks have what one that reads all has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import write_chat_tokenizer
from prompt_rows import write_rows, write_tokenizer
from ranks import Ranks
from test_drawn_rows import STRICT, said

import megarl.data.example_set
from megarl.config.data import DataConfig
from megarl.data.example_batch import batch_of_examples
from megarl.data.example_set import ExampleSet, fits_of, load_examples
from megarl.data.prompt_sampler import PromptSampler
from megarl.data.row_files import RowRefused
from megarl.data.tokenizer import load_tokenizer
from megarl.parallel.world import World
from megarl.trainer.example_reader import ExampleReader
from megarl.types import Batch

ROWS = 30
FORMATS: dict[str, Any] = {
    "demonstrations": lambda i: {"prompt": "7" * (1 + i % 5), "answer": f"{i}"},
    "preferences": lambda i: {"prompt": "7", "chosen": f"{i}", "rejected": "1" * (1 + i % 3), "margin": i / 4},
    "judged": lambda i: {"prompt": "7" * (1 + i % 3), "answer": f"{i}", "label": i % 2},
}
"""Rows, of which some are longer than others."""


def load(
    folder: str, format: Any, *, drawn: bool = True, tokenizer: str = "tokenizer.model", **keys: Any
) -> ExampleSet:
    """The rows of `write`; with `drawn` they are only looked at, as those of a large file are."""
    usual = megarl.data.example_set.LATER_BYTES
    megarl.data.example_set.LATER_BYTES = -1 if drawn else usual
    data = DataConfig.model_validate({"filter_overlong_prompts": True, "cache_dir": f"{folder}/cache", **keys})
    try:
        examples = load_examples(
            data, format, [f"{folder}/rows.jsonl"], load_tokenizer(os.path.join(folder, tokenizer))
        )
    finally:
        megarl.data.example_set.LATER_BYTES = usual
    assert examples.drawn == drawn
    return examples


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_tokenizer(folder)
    write_rows(folder / "rows.jsonl", rows)


@contextmanager
def noted(examples: ExampleSet) -> Iterator[list[int]]:
    """Rows that are read meanwhile."""
    rows: list[int] = []
    read = examples._read
    examples._read = lambda row: rows.append(int(row["index"])) or read(row)  # type: ignore[method-assign]
    yield rows
    del examples._read  # type: ignore[method-assign]


def same(a: Batch, b: Batch) -> list[str]:
    """Names of the fields that differ."""
    pairs = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(Batch) if f.name != "owners"]
    return [name for name, x, y in pairs if not (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y)]


def _read(folder: str, format: str, drawn: bool) -> list[Any]:
    """What differs from a batch of all examples, rows that were read here, and tokens that are here and in all."""
    reader, rows = ExampleReader(examples := load(folder, format, drawn=drawn), World()), [3, 17, 4, 9, 12, 29, 0]
    with noted(examples) as own:
        batch = reader.batch(rows)
    whole = batch_of_examples([examples[row] for row in rows])
    return [same(batch.everywhere(), whole), own, len(batch.tokens), len(whole.tokens)]


@pytest.mark.parametrize("drawn", [False, True], ids=["mapped", "drawn"])
@pytest.mark.parametrize("format", FORMATS)
def test_ranks_together_have_the_batch(ranks: Ranks, tmp_path: Path, format: str, drawn: bool) -> None:
    write(tmp_path, [FORMATS[format](i) for i in range(ROWS)])
    results = ranks.run(3, _read, str(tmp_path), format, drawn)
    assert [differ for differ, *_ in results] == [[]] * 3
    assert [rows for _, rows, *_ in results] == [[3, 9, 12, 0], [4], [17, 29]]  # row i by rank i modulo 3
    assert sum(here for _, _, here, _ in results) == results[0][3]


def _drawn(folder: str) -> Any:
    """Rows of 13 batches, by a sampler that asks the ranks together and by one that asks this rank for all."""
    examples, alone = (load(folder, "demonstrations", max_prompt_length=4) for _ in range(2))
    kinds = (ExampleReader(examples, World()).fits, fits_of(alone))
    samplers = [PromptSampler(ROWS, 4, True, 7, fits=fits) for fits in kinds]
    return [[sampler.next() for _ in range(13)] for sampler in samplers], len(examples._held), len(alone._held)


def test_rows_that_are_too_long_are_found_together(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, [FORMATS["demonstrations"](i) for i in range(ROWS)])
    (rows, held, alone), (others, held_there, _) = ranks.run(2, _drawn, str(tmp_path))
    assert rows[0] == rows[1] == others[0] == others[1] and all(i % 5 < 4 for batch in rows[0] for i in batch)
    assert held + held_there == alone == 24  # each row was tokenised on one rank


def _refused(folder: str) -> list[str]:
    """What a rank hears of a row that another one cannot use, as all ask for it and as they read it."""
    usual, megarl.data.example_set.TRIED = megarl.data.example_set.TRIED, 2
    try:
        reader, told = ExampleReader(load(folder, "demonstrations", messages_key="m", tokenizer=""), World()), []
    finally:
        megarl.data.example_set.TRIED = usual
    for call in (reader.fits, reader.batch):
        assert call is not None
        with pytest.raises(RowRefused) as refused:
            call([3, 4, 5])
        told.append(str(refused.value))
    return told


def test_a_row_that_one_rank_cannot_use_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, STRICT)
    write_rows(tmp_path / "rows.jsonl", [{"m": said("7", "bad" if i == 4 else "8")} for i in range(9)])
    results = ranks.run(3, _refused, str(tmp_path))
    assert len({line for lines in results for line in lines}) == 1
    assert "rows.jsonl:5: the chat template refuses the messages: bad word; it was looked at" in results[0][0]


def _changed(folder: str) -> str:
    world = World()
    reader = ExampleReader(load(folder, "demonstrations"), world)
    world.barrier("the file is open")
    if world.rank == 0:
        with open(f"{folder}/rows.jsonl", "r+") as file:
            file.write('{"prompt": "8"')
    world.barrier("row 0 is another one")
    with pytest.raises(RowRefused) as refused:
        reader.batch([1, 2, 0])
    return str(refused.value)


def test_a_row_that_changed_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, [FORMATS["demonstrations"](i) for i in range(ROWS)])
    results = ranks.run(2, _changed, str(tmp_path))
    assert results[0] == results[1] and "rows.jsonl:1" in results[0]

"""Rows with answers: tokenised once by other processes, and mapped; the same as row by row, whatever the files are."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from prompt_rows import write_rows, write_tokenizer
from pyarrow import parquet
from selection import quick
from test_chat_rows import write_byte_tokenizer
from test_data import REPLY, TURNS, chat, chat_tokenizer

import megarl.data.example_set
import megarl.data.index_cache
import megarl.data.index_making
import megarl.data.scan_workers
from megarl.config.data import DataConfig
from megarl.data.demonstrations import demonstration, judged
from megarl.data.example_set import ExampleSet, load_examples
from megarl.data.examples import Example
from megarl.data.preferences import preference
from megarl.data.readers import iterate_rows
from megarl.data.row_files import RowsChanged
from megarl.data.row_index import StoredTokens
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.trainer.digests import digest
from megarl.trainer.resuming.identity import examples_digest

SAID = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "demonstrations": [{"messages": chat(*["7 +", "8"] * (1 + i % 3))} for i in range(40)],
    "preferences": [
        {"prompt": f"7+{'8' * (i % 5)}", "chosen": "7", "rejected": "87" if i % 4 else "7", "by": i / 8}
        for i in range(40)
    ],
    "judged": [{"prompt": SAID[:1], "answer": SAID[1:], "label": i % 3 == 0} for i in range(40)],
}
OF_ROW = {"demonstrations": demonstration, "preferences": preference, "judged": judged}
KEYS = {"demonstrations": {"messages_key": "messages"}, "preferences": {"margin_key": "by"}, "judged": {}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of characters."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with a chat template, which processes of other processes run."""
    folder = tmp_path_factory.mktemp("chats")
    chat_tokenizer(folder, TURNS + REPLY)
    return str(folder)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go by way of the cache, in so short stretches that each has many."""
    monkeypatch.setattr(megarl.data.index_making, "STRETCH_BYTES", 512)
    monkeypatch.setattr(megarl.data.example_set, "SMALL_BYTES", -1)


def load(tokenizer: str, files: list[str], format: Any, cache: Path, **keys: Any) -> ExampleSet:
    data = DataConfig.model_validate({**KEYS[format], "cache_dir": str(cache), **keys})
    return load_examples(data, format, files, load_tokenizer(tokenizer), tokenizer_key=tokenizer)


def one_by_one(path: str, files: list[str], format: str, **keys: Any) -> list[Example]:
    data, tokenizer = DataConfig.model_validate({**KEYS[format], **keys}), load_tokenizer(path)
    return [OF_ROW[format](row, data, tokenizer) for row in iterate_rows(files, "x")]


@pytest.mark.parametrize("format", quick(["preferences", "demonstrations", "judged"], 0))
def test_both_ways_give_the_rows_of_the_files(tmp_path: Path, format: str, request: pytest.FixtureRequest) -> None:
    """In memory and by way of the cache; of a file of lines and of a table that is converted; and the same digest."""
    tokenizer = request.getfixturevalue("tokenizer" if format == "preferences" else "chats")
    lines = write_rows(tmp_path / "a.jsonl", ROWS[format])
    parquet.write_table(pa.Table.from_pylist(ROWS[format][::-1]), tmp_path / "b.parquet", row_group_size=7)
    files, cache = [lines, f"{tmp_path}/b.parquet"], tmp_path / "cache"
    expected = one_by_one(tokenizer, files, format)
    here = load(tokenizer, files, format, cache)
    assert list(here) == expected and not cache.exists()
    request.getfixturevalue("cached")
    there = load(tokenizer, files, format, cache)
    assert list(there) == expected and there[3:5] == expected[3:5]
    assert here.digest == there.digest == examples_digest(expected) == digest(e.contents for e in expected)
    assert here.longest == there.longest == max(expected, key=lambda example: example.tokens)
    assert here.remarks == there.remarks
    (entry,) = [path for path in cache.iterdir() if path.is_dir()]
    assert sorted(path.name for path in entry.iterdir()) == ["meta.json", "rows.bin", "tokens.bin"]


def test_the_next_start_tokenises_nothing(
    tmp_path: Path, tokenizer: str, cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the file's content is read; what tokens depend on makes another entry."""
    file, cache = write_rows(tmp_path / "a.jsonl", ROWS["preferences"]), tmp_path / "cache"
    first = load(tokenizer, [file], "preferences", cache)
    monkeypatch.setattr(megarl.data.index_cache, "make_index", lambda *_: pytest.fail("it is there"))
    second = load(tokenizer, [file], "preferences", cache)
    assert list(first) == list(second) and first.digest == second.digest and first.remarks == second.remarks
    assert isinstance(second._index.tokens, StoredTokens) and isinstance(second._index.rows, np.memmap)
    for keys in ({"margin_key": ""}, {"rejected_key": "chosen"}, {"max_response_length": 9}, {"truncation": "left"}):
        with pytest.raises(pytest.fail.Exception):
            load(tokenizer, [file], "preferences", cache, **keys)


def test_a_bad_row_is_named(tmp_path: Path, tokenizer: str, cached: None) -> None:
    """By the row's own line, the first of all in the order of the files, however many processes look for it."""
    rows = [*ROWS["preferences"] * 3]
    rows[101] = {"prompt": "7", "chosen": "7", "rejected": None, "by": 0}
    rows[103] = {"prompt": "7", "chosen": "7", "rejected": "8", "by": float("inf")}
    file = write_rows(tmp_path / "a.jsonl", rows)
    said = f"{file}:102: the answer in column 'rejected' must be text or a number, not null"
    for keys, refusal in (({}, said), ({"max_response_length": 2}, f"{file}:2: the answer in column 'rejected' has 3")):
        with pytest.raises(ValueError) as error:
            load(tokenizer, [file], "preferences", tmp_path / "cache", **keys)
        assert str(error.value).startswith(refusal) and "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    with pytest.raises(ValueError, match=f"data.train_files: '{tmp_path}/b.jsonl' holds no rows"):
        (tmp_path / "b.jsonl").write_text("\n")
        load(tokenizer, [f"{tmp_path}/b.jsonl"], "preferences", tmp_path / "cache")


def test_what_is_left_out_is_counted(tmp_path: Path, tokenizer: str, cached: None) -> None:
    file, cache = write_rows(tmp_path / "a.jsonl", ROWS["preferences"]), tmp_path / "cache"
    keys = {"max_prompt_length": 4, "filter_overlong_prompts": True}
    loaded = load(tokenizer, [file], "preferences", cache, **keys)
    assert [example.source for example in loaded] == [f"{file}:{i + 1}" for i in range(40) if i % 5 < 3]
    assert loaded.remarks == (
        "data.train_files: 16 of 40 rows left out: 16 over data.max_prompt_length = 4 or data.max_response_length = "
        "512 tokens",
        "remark: data.train_files: in 6 of 24 pairs chosen and rejected are the same",
    )
    with pytest.raises(ValueError, match=r"none of the 40 rows keeps to data.max_prompt_length = 1 and data.max_resp"):
        load(tokenizer, [file], "preferences", cache, **{**keys, "max_prompt_length": 1})


def test_examples_in_both_files_are_counted(tmp_path: Path, tokenizer: str) -> None:
    """As `set` would: by their tokens, whatever their labels are."""
    rows = [{"prompt": "7" * (1 + i % 3), "chosen": "8", "rejected": "7", "by": i} for i in range(9)]
    train, held_out = (
        load(tokenizer, [write_rows(tmp_path / name, part)], "preferences", tmp_path)
        for name, part in (("a.jsonl", rows[:2]), ("b.jsonl", rows))
    )
    sequences = {example.sequences for example in train}
    assert held_out.in_common(train) == sum(example.sequences in sequences for example in held_out) == 6


@pytest.mark.parametrize("damaged", ["rows.bin", "tokens.bin"])
def test_damage_is_seen_when_an_example_is_drawn(tmp_path: Path, tokenizer: str, cached: None, damaged: str) -> None:
    cache, file = tmp_path / "cache", write_rows(tmp_path / "a.jsonl", ROWS["preferences"])
    load(tokenizer, [file], "preferences", cache)
    (path,) = cache.glob(f"*/{damaged}")
    with open(path, "r+b") as f:
        f.seek(12)
        f.write(b"\xff\xff\xff\x7f")
    loaded = load(tokenizer, [file], "preferences", cache)
    with pytest.raises(RowsChanged, match="is no longer what was written there; remove it and start again to go on"):
        list(loaded)


def test_a_tokenizer_in_another_process_is_the_same(tmp_path: Path) -> None:
    """With its settings; and a template that was run here is run there by a process of its own."""
    write_byte_tokenizer(tmp_path)
    text = "<|im_end|> naïve"
    for reads in (False, True):
        tokenizer: Tokenizer = load_tokenizer(str(tmp_path), read_special_tokens=reads)
        said = tokenizer.encode_chat([{"role": "user", "content": text}])
        other: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
        assert other.encode(text) == tokenizer.encode(text)
        assert other.encode_chat([{"role": "user", "content": text}]) == said


@pytest.mark.parametrize("forked", [True, False])
def test_a_worker_that_is_lost(
    tmp_path: Path, tokenizer: str, cached: None, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    """One line says so, and nothing stays."""

    def lost(self: Any, stretches: Iterator[Any]) -> Iterator[Any]:
        interpreter = psutil.Process(self._process.process.pid)
        while not interpreter.children():
            time.sleep(0.01)
        processes.extend([*interpreter.children(), interpreter])
        processes[0 if forked else -1].kill()
        return original(self, stretches)

    processes: list[psutil.Process] = []

    original = megarl.data.scan_workers.ScanWorkers.look_at
    monkeypatch.setattr(megarl.data.scan_workers.ScanWorkers, "look_at", lost)
    file = write_rows(tmp_path / "a.jsonl", ROWS["preferences"])
    with pytest.raises(ValueError, match=r"data.train_files: a process that read the rows was killed by SIGKILL"):
        load(tokenizer, [file], "preferences", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_a_number_of_a_label_is_kept_exactly(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "7", "chosen": "8", "rejected": "7", "by": by} for by in (0.1, -1e300, 0)]
    loaded = load(tokenizer, [write_rows(tmp_path / "a.jsonl", rows)], "preferences", tmp_path)
    assert [example.label for example in loaded] == [0.1, -1e300, 0.0]
    assert loaded.digest == digest(json.dumps([*e.sequences, e.label]).encode() for e in loaded)
    assert replace(loaded[0], label=0.0) != loaded[0]

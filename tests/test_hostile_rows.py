"""Rows and tokenizers that are far larger than their files: refused in one line, or read in little memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prompt_rows import read, write_rows, write_tokenizer
from pyarrow import parquet
from test_chat_rows import write_byte_tokenizer
from test_data import message
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

import megarl.data.index_making
import megarl.data.prompts
from megarl.data.index_making import TooLarge
from megarl.data.json_lines import LONGEST_LINE
from megarl.data.readers import iterate_rows
from megarl.data.tokenizer import load_tokenizer

READER = """
import sys
from memory_peak import memory_peak
from megarl.data.readers import iterate_rows
try:
    print(sum(1 for _ in iterate_rows(sys.argv[1:], "x")))
except ValueError as e:
    print(e)
print(memory_peak() >> 20)
"""


def outcome(file: Path) -> str:
    """What reading all of it says, in a process that cannot fill the machine; checks that it took below 2 GB."""
    ended = subprocess.run(
        [sys.executable, "-c", READER, file],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30)),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    said, megabytes = ended.stdout.splitlines()
    assert int(megabytes) < 2000
    return said


def shared(text: str, rows: int) -> pa.DictionaryArray:
    """A column of one text in all rows."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"prompt": "1", "answer": "1"}])
    os.truncate(file, 5 * 2**30)  # it takes no room
    said = f"{file}:2 has more than {LONGEST_LINE} bytes; a row can have no more"
    assert outcome(file) == f"x: {said}"
    tokenizer = write_tokenizer(tmp_path)
    for bytes in (2**40, 0):
        monkeypatch.setattr(megarl.data.prompts, "SMALL_BYTES", bytes)
        assert message(lambda: read(tokenizer, [str(file)], cache_dir=str(tmp_path))) == f"data.train_files: {said}"


@pytest.mark.parametrize(
    "header",
    [
        b"\x15\0\x15\2\x15\2\x25\x0e\0",  # a number where the page's own header belongs
        b"\x15\0\x1c\0\x15\2\x2c\0\0",  # a struct where the size does
        b"\x15\0\x15\1\x15\2\x2c\0\0",  # less than no bytes
    ],
)
def test_a_page_s_header_of_another_form(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["1"] * 100}), file, use_dictionary=False)
    at, content = parquet.ParquetFile(file).metadata.row_group(0).column(0).data_page_offset, file.read_bytes()
    file.write_bytes(content[:at] + header + content[at + len(header) :])
    with pytest.raises(ValueError, match=r"^x: [^\n]+ a page[^\n]+$"):
        list(iterate_rows([str(file)], "x"))


def test_a_line_that_is_too_long_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1"}, {"prompt": "12"}])
    tokenizer = write_tokenizer(tmp_path)
    monkeypatch.setattr("megarl.data.json_lines.LONGEST_LINE", len('{"prompt": "12"}\n'))
    assert len(read(tokenizer, [file])) == 2
    monkeypatch.setattr("megarl.data.json_lines.LONGEST_LINE", len('{"prompt": "12"}\n') - 1)
    assert "rows.jsonl:2 has more than 16 bytes" in message(lambda: read(tokenizer, [file]))
    assert "rows.jsonl:2 has more than 16 bytes" in message(lambda: list(iterate_rows([file], "x")))


def test_rows_that_share_a_long_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": shared("x" * 2**23, 2048)}), file, compression="zstd")
    assert outcome(file).endswith(f"its {file.stat().st_size} bytes come to rows of more than {2**30}")
    parquet.write_table(pa.table({"prompt": shared("x" * 2**23, 20)}), file, compression="zstd")
    assert outcome(file) == "20"


def test_lists_that_share_a_long_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    texts = shared("x" * 2**20, 2**14).cast(pa.dictionary(pa.int32(), pa.string()))
    rows = pa.ListArray.from_arrays(pa.array([0, 2**13, 2**14], pa.int32()), texts)
    parquet.write_table(pa.table({"prompt": rows}), file, store_schema=False)
    assert "single rows or pages may take" in outcome(file)


def test_a_column_of_zeros(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    zeros = pa.array([bytes(30 * 2**20)] * 5)
    table = pa.table({"prompt": ["1"] * 5, "big": zeros})
    parquet.write_table(table, file, compression="zstd", use_dictionary=False)
    assert "are compressed more than 1000 times" in outcome(file)


def test_large_rows_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of fewer rows, in several row groups, the rows are found where they are."""
    tokenizer, file = write_tokenizer(tmp_path), tmp_path / "rows.parquet"
    table = pa.table({"prompt": [str(i) for i in range(3000)], "big": shared("x" * 2**20, 3000)})
    parquet.write_table(table, file, row_group_size=1700, compression="zstd")
    monkeypatch.setattr(megarl.data.index_making, "ARROW_BYTES", 2**20)
    monkeypatch.setattr("megarl.data.readers.MOST_BYTES", 2**40)
    monkeypatch.setattr(megarl.data.prompts, "SMALL_BYTES", 0)
    monkeypatch.setattr("megarl.data.readers._plain", lambda batch: batch.select(["prompt"]))
    prompts = read(tokenizer, [str(file)], cache_dir=str(tmp_path / "cache"))
    assert [(p.row["prompt"], p.source) for p in prompts] == [(str(i), f"{file} row {i + 1}") for i in range(3000)]


def test_a_small_file_of_many_rows_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, file = write_tokenizer(tmp_path), tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": [str(i) for i in range(50)]}), file)
    monkeypatch.setattr(megarl.data.index_making, "HELD_BYTES", 100)
    prompts = read(tokenizer, [str(file)], cache_dir=str(tmp_path / "cache"))
    assert [p.row["prompt"] for p in prompts] == [str(i) for i in range(50)]
    assert (tmp_path / "cache").is_dir()
    with pytest.raises(TooLarge, match="comes to rows of more than 100 bytes"):
        megarl.data.prompts.load_prompts(prompts._data, [str(file)], load_tokenizer(tokenizer))


def spoil(folder: Path, **steps: Any) -> None:
    """A tokenizer's folder with other steps."""
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, step in steps.items():
        setattr(tokenizer, name, step)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_that_multiplies_text(tmp_path: Path) -> None:
    tenfold = normalizers.Replace("1", "1" * 10)
    spoil(tmp_path, normalizer=normalizers.Sequence([tenfold] * 12))
    said = f"'{tmp_path}/tokenizer.json' makes more than 1000 characters of one: its steps multiply text"
    assert message(lambda: load_tokenizer(str(tmp_path))) == said
    spoil(tmp_path, normalizer=normalizers.Sequence([normalizers.Replace(Regex("1*"), "1" * 40)] * 2))
    assert message(lambda: load_tokenizer(str(tmp_path))) == said
    spoil(tmp_path, normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), tenfold]))
    load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("step", ["normalizers", "decoders"])
def test_steps_within_steps(tmp_path: Path, step: str) -> None:
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    inner: Any = {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 11}
    for _ in range(3):
        inner = {"type": "Sequence", step: [inner, {"type": "Replace", "pattern": {"String": "1"}, "content": "11111"}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), step.removesuffix("s"): inner}))
    assert "its steps multiply text" in message(lambda: load_tokenizer(str(tmp_path)))


def test_a_tokenizer_that_gives_up(tmp_path: Path) -> None:
    """Its library panics, which is no Exception."""
    bytes_after = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex("(1+)+x"), "isolated")
    spoil(tmp_path, pre_tokenizer=pre_tokenizers.Sequence([split, bytes_after]))
    tokenizer, text = load_tokenizer(str(tmp_path)), "1" * 40 + "+"
    for use in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_batch(["1", text])):
        said = message(use)
        assert said.startswith(f"the tokenizer in '{tmp_path}' failed: ") and "\n" not in said
    assert tokenizer.decode(tokenizer.encode("11+")) == "11+"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_no_refusal(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer: Any = load_tokenizer(str(tmp_path))

    def ended(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tokenizer._tokenizer, "decode", ended)
    with pytest.raises(error):
        tokenizer.decode([1])

"""Rows in every form that they are read in: the same prompts, answers and identity; and files that mean harm."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prompt_rows import read, read_rows, write_tokenizer
from pyarrow import parquet
from test_data import message

import megarl.data.json_lines
import megarl.data.prompts
from megarl.data.scan import digest_of

TEXTS = [{"prompt": f"{i}+{i}=é\n", "answer": str(2 * i), "level": 'a,"b"' if i % 2 else ""} for i in range(200)]
TYPED = [
    {
        "prompt": [{"role": "user", "content": f"{i} é"}],
        "answer": i,
        "reward_model": {"ground_truth": i / 4, "style": "rule" if i % 3 else None},
        "tags": [True, None, False][: i % 4],
    }
    for i in range(200)
]
Rows = list[dict[str, Any]]


def jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_stream(path: Path, rows: Rows | pa.Table) -> None:
    """As `datasets` does it."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def write_saved(path: Path, rows: Rows) -> None:
    """A folder of `save_to_disk`."""
    path.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (path / name).write_text("{}")
    write_stream(path / "data-00000-of-00002.arrow", rows[:90])
    write_stream(path / "data-00001-of-00002.arrow", rows[90:])


def write_folder(path: Path, rows: Rows) -> None:
    path.mkdir()
    (path / "README.md").write_text("rows")
    (path / "part-0.jsonl").write_bytes(jsonl(rows[:50]))
    (path / "part-1.jsonl.gz").write_bytes(gzip.compress(jsonl(rows[50:])))


def write_file_format(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_gz(path: Path, rows: Rows) -> None:
    path.write_bytes(gzip.compress(jsonl(rows[:9])) + gzip.compress(jsonl(rows[9:])))


def write_zst(path: Path, rows: Rows) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as f:
        f.write(jsonl(rows))


def write_csv(path: Path, rows: Rows) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


FORMS: dict[str, Callable[[Path, Rows], object]] = {
    "rows.jsonl": lambda path, rows: path.write_bytes(jsonl(rows)),
    "rows.jsonl.gz": write_gz,
    "rows.jsonl.zst": write_zst,
    "array.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "data.json": lambda path, rows: path.write_text(json.dumps({"data": rows})),
    "lines.json": lambda path, rows: path.write_bytes(jsonl(rows)),
    "rows.parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path),
    "rows.arrow": write_file_format,
    "saved": write_saved,
    "folder": write_folder,
    "rows.csv": write_csv,
}  # fmt: skip


def test_the_same_rows_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, found = write_tokenizer(tmp_path), {}
    monkeypatch.setattr(megarl.data.json_lines, "BLOCK", 500)  # rows lie across blocks
    for name, write in FORMS.items():
        write(tmp_path / name, TEXTS)
        prompts = read(tokenizer, [str(tmp_path / name)])
        assert [prompt.row for prompt in prompts] == TEXTS, name
        assert [row.columns for row in read_rows([str(tmp_path / name)], "x")] == TEXTS, name
        found[name] = [prompts.digest, *(prompt.token_ids for prompt in prompts)]
    assert all(one == found["rows.jsonl"] for one in found.values()), found


@pytest.mark.slow
def test_every_form_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megarl.data.prompts, "SMALL_BYTES", 0)
    for name, write in FORMS.items():
        write(tmp_path / name, TEXTS)
    files, cache = [str(tmp_path / name) for name in FORMS], tmp_path / "cache"
    for _ in range(2):
        prompts = read(write_tokenizer(tmp_path), files, cache_dir=str(cache))
        assert [prompt.row for prompt in prompts] == TEXTS * len(FORMS)
        assert prompts.sizes == [200] * len(FORMS)
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    assert len(list(entry.glob("*.jsonl"))) == 7 and len(list(entry.glob("*.arrow"))) == 4


def test_rows_with_types(tmp_path: Path) -> None:
    """Numbers, lists and objects; fields that are null are as good as missing, as tables have to fill them in."""
    digests = []
    for name, write in FORMS.items():
        if name != "rows.csv":
            write(tmp_path / name, TYPED)
            rows = read_rows([str(tmp_path / name)], "x")
            assert [row.columns for row in rows] == TYPED, name
            digests.append([digest_of(row.columns) for row in rows])
    assert all(one == digests[0] for one in digests) and len(set(digests[0])) == 200
    bare = {**TYPED[0], "reward_model": {"ground_truth": 0.0}}
    assert digest_of(bare) == digests[0][0] != digest_of({**bare, "tags": [None]})


def test_where_a_row_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"x": 1},\n\n {"x": 2}]')
    (tmp_path / "b.csv").write_text("x\n1\n\n2\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\n{"x": 1}'))
    rows = read_rows([str(tmp_path / "*")], "x")
    assert [row.source.removeprefix(f"{tmp_path}/") for row in rows] == [
        "a.json row 1", "a.json row 2", "b.csv row 1", "b.csv row 3", "c.jsonl.gz:2"]  # fmt: skip


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return message(lambda: read_rows([str(path)], "x")).removeprefix(f"x: {path} ").removeprefix(f"x: '{path}' ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[{"x": 1} {"x": 2}]', "row 1 is followed by '{' instead of ','"),
        (b'[{"x": 1},]', "row 2 is not JSON: Expecting value"),
        (b'[{"x": 1}', "row 1 is followed by '' instead of ']'"),
        (b'[{"x": 1}] []', "goes on behind its 1 rows"),
        (b'{"data": [{"x": 1}], "version": 2}', "row 1 is followed by ',' instead of '}'"),
        (b'[{"x": 1}, 2]', "row 2 must be an object of columns, not int"),
        (b'[{"x": 1}, {"x": "' + b"y" * 2000, "row 2 has more than 1000 bytes; a row can have no more"),
        (b'[{"x": ' + b"[" * 100_000, "row 1 is nested too deeply"),
        (b'[{"x": "\xff"}]', "is not UTF-8: invalid start byte"),
        (b"[]", "holds no rows"),
    ],
)
def test_json_of_another_form(tmp_path: Path, content: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megarl.data.json_lines, "BLOCK", 100)
    if b"y" in content:
        monkeypatch.setattr(megarl.data.json_lines, "LONGEST_LINE", 1000)
    assert refusal(tmp_path / "rows.json", content) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"x,y\n1\n", "row 1 has 1 values for 2 columns"),
        (b"x,y\n1,2\n3,4,5\n", "row 2 has 3 values for 2 columns"),
        (b"x,x\n1,2\n", "names a column twice"),
        (b'x\n1\n"2', "row 2 is not CSV: unexpected end of data"),
        (b'x\n"' + b"2\n" * 1000, "row 1 has more than 1000 bytes; a row can have no more"),
        (b"y" * 500 + b"".join(b",%d" % i for i in range(100)) + b"\n" + b"," * 100, "row 1 has more than 1000 bytes"),
        (b"x\n", "holds no rows"),
        (b"", "holds no rows"),
    ],
)
def test_csv_of_another_form(tmp_path: Path, content: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megarl.data.json_lines, "LONGEST_LINE", 1000)
    assert said in refusal(tmp_path / "rows.csv", content)


def test_packed_files_that_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = gzip.compress(b"0" * 2**20)
    monkeypatch.setattr(megarl.data.json_lines, "LONGEST_LINE", 2**16)
    assert ":1 has more than 65536 bytes" in refusal(tmp_path / "line.jsonl.gz", endless)
    monkeypatch.setattr(megarl.data.json_lines, "MOST_BYTES", 2**16)
    monkeypatch.setattr(megarl.data.json_lines, "MOST_TIMES", 2)
    many = gzip.compress(b'{"x": 1}\n' * 10_000)
    assert f"the {len(many)} bytes of " in refusal(tmp_path / "lines.jsonl.gz", many)
    cut = gzip.compress(jsonl(TEXTS))[:-100]
    assert refusal(tmp_path / "cut.jsonl.gz", cut) == "cannot be read: Truncated compressed stream"
    assert "cannot be read" in refusal(tmp_path / "other.jsonl.zst", gzip.compress(b"x"))


def arrow_refusal(path: Path, table: pa.Table, **options: Any) -> str:
    how = pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=how) as writer:
        writer.write_table(table)
    return message(lambda: read_rows([str(path)], "x")).partition("is not a readable Arrow file: ")[2]


def test_arrow_files_that_expand(tmp_path: Path) -> None:
    file, many = tmp_path / "rows.arrow", 2**31 - 1
    assert arrow_refusal(file, pa.table({"x": ["a"]}), compression="zstd").startswith("it is compressed")
    nulls = pa.Array.from_buffers(pa.null(), many, [None])
    assert arrow_refusal(file, pa.table({"x": nulls})).endswith(f"say that they hold {many} rows")
    nothing = pa.ListArray.from_arrays(pa.array([0, many], pa.int32()), nulls)
    inside = pa.StructArray.from_arrays([nothing], ["y"])
    for lists in (nothing, inside):
        said = f"it has lists of {many} elements without a value"
        assert arrow_refusal(file, pa.table({"x": lists})) == said
    kinds = {
        "dictionary": pa.array(["a"]).dictionary_encode(),
        "string_view": pa.array(["a"], pa.string_view()),
        "run_end_encoded": pa.RunEndEncodedArray.from_arrays(pa.array([2**30], pa.int32()), ["a"]),
    }
    for kind, array in kinds.items():
        assert f"'x' is of the type {kind}" in arrow_refusal(file, pa.table({"x": array}))
    views = pa.table({"x": kinds["string_view"]})
    assert arrow_refusal(file, views).endswith("which is not read; write texts as large_string (polars: "
                                               "compat_level=pl.CompatLevel.oldest())")  # fmt: skip
    wide = pa.table({str(i): [1] for i in range(10_001)})
    assert arrow_refusal(file, wide) == "it has 10001 columns and fields of these; 10000 can be read"


def test_places_in_an_arrow_file_that_are_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    write_stream(file, [{"x": "abcdefgh"}, {"x": "ijklmnop"}])
    content = file.read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 8, 16))
    assert content.count(offsets) == 1
    wrong = b"".join(n.to_bytes(4, "little") for n in (0, 8, 2**30))
    assert "is not a readable Arrow file" in refusal(file, content.replace(offsets, wrong))
    assert refusal(file, content[:4]).startswith("is not a readable Arrow file")
    assert refusal(file, b"").startswith("is not a readable Arrow file")


def test_an_arrow_file_is_read_by_its_footer(tmp_path: Path) -> None:
    """As polars writes them: what stands before the record batches is no message."""
    table = pa.table({"x": ["a", "b", "c"], "n": [1, 2, 3]})
    file = tmp_path / "rows.arrow"
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    content = bytearray(file.read_bytes())
    first = int.from_bytes(content[12:16], "little")
    content[8 : 16 + first] = bytes(8 + first)
    file.write_bytes(content)
    assert [row.columns for row in read_rows([str(file)], "x")] == table.to_pylist()
    for cut in (len(content) - 4, 40):
        assert "is not a readable Arrow file" in refusal(file, bytes(content[:cut]))


def test_folders(tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        return message(lambda: read_rows([str(folder)], "x")).removeprefix("x: ")

    folder = tmp_path / "rows"
    (folder / "train").mkdir(parents=True)
    assert said(folder).startswith(f"the folder '{folder}' has no .jsonl, .json, .csv")
    (folder / "train" / "a.csv").write_text("x\n1\n")
    assert said(folder) == f"the rows of '{folder}' are in folders of it: name '{folder}/**/*.csv'"
    assert len(read_rows([f"{folder}/**/*.csv"], "x")) == 1
    (folder / "a.csv").write_text("x\n1\n")
    (folder / "b.jsonl").write_text('{"x": 1}\n')
    assert said(folder) == f"the folder '{folder}' holds files of csv and jsonl; name the files"
    (folder / "dataset_dict.json").write_text("{}")
    assert said(folder) == f"'{folder}' holds the splits train: name one, as {folder}/NAME"

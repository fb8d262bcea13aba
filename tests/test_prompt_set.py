"""Prompts that stay on disk: those of the rows read one by one, whatever the files are like; refused by their line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_rows import read, read_rows, write_rows, write_tokenizer
from pyarrow import parquet
from selection import quick
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import megarl.data.index_making
import megarl.data.prompts
import megarl.data.row_set
from megarl.config.data import DataConfig
from megarl.data.prompts import PromptSet
from megarl.data.row_files import RowsChanged
from megarl.data.scan import Scan, bounded
from megarl.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(params=quick(["in memory", "in the cache"], 0))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Keys of a read that goes the one or the other way; stretches are so short that a file has many."""
    monkeypatch.setattr(megarl.data.index_making, "STRETCH_BYTES", 64)
    if request.param == "in the cache":
        monkeypatch.setattr(megarl.data.prompts, "SMALL_BYTES", -1)
    return {"cache_dir": str(tmp_path / "cache")}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_are_those_of_the_file(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    """Blank lines, other line ends, no last line end, other alphabets, a line longer than any block."""
    lines = [json.dumps({"prompt": f"{i}+{i}", "answer": str(2 * i), "n": {"deep": [i, None]}}) for i in range(50)]
    lines[3] = json.dumps({"prompt": "é" * 7, "answer": "日本"}, ensure_ascii=False)
    lines[5] = json.dumps({"prompt": "1", "answer": "x" * 10_000, "big": 10**30})
    lines[7:7] = ["", "  ", "\t"]
    file = tmp_path / "rows.jsonl"
    file.write_bytes("\r\n".join(lines[:20]).encode() + b"\r\n\n\n" + "\n".join(lines[20:]).encode())
    found, plain = read(tokenizer, [str(file)], **way), read_rows([str(file)], "")
    assert [(p.source, p.row) for p in found] == [(row.source, row.columns) for row in plain]
    assert [p.index for p in found] == list(range(50)) and found[-1].index == 49
    encode = load_tokenizer(tokenizer).encode
    assert [list(p.token_ids) for p in found] == [encode(row.columns["prompt"]) for row in plain]
    assert found[5].row["big"] == 10**30 and found[7].source == f"{file}:11"
    assert [p.index for p in found[2:5]] == [2, 3, 4]
    with pytest.raises(IndexError):
        found[50]


def test_parquet_by_row_groups(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    """Several groups of odd sizes, nested columns, times, categories that differ between groups."""
    count = 3000
    table = pa.table(
        {
            "prompt": [f"{i}+1" for i in range(count)],
            "answer": [i + 1 for i in range(count)],
            "when": [datetime(2026, 1, 1, 0, 0, i % 60) for i in range(count)],
            "meta": [{"k": [i, None], "s": {"t": str(i)}} for i in range(count)],
            "kind": pa.array([f"k{i // 700}" for i in range(count)]).dictionary_encode(),
        }
    )
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    found, plain = read(tokenizer, [str(tmp_path / "rows.parquet")], **way), table.to_pylist()
    assert len(found) == count
    for i in (0, 699, 700, 1023, 1024, 2047, 2048, 2999):
        assert found[i].row == plain[i] and found[i].source == f"{tmp_path}/rows.parquet row {i + 1}"
        assert load_tokenizer(tokenizer).decode(found[i].token_ids) == f"{i}+1"


def test_a_folder_of_parquet_files(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    (tmp_path / "all.parquet").mkdir()
    for name in ("b", "a"):
        parquet.write_table(pa.table({"prompt": [name]}), tmp_path / "all.parquet" / f"{name}.parquet")
    assert [p.row["prompt"] for p in read(tokenizer, [f"{tmp_path}/all.parquet"], **way)] == ["a", "b"]


def test_a_broken_line_is_named(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    good = [json.dumps({"prompt": str(i), "answer": "1"}) for i in range(200)]
    for line, said in (
        ('{"prompt": "1"', " is not JSON: Expecting ',' delimiter"),
        ("[1]", " must be an object of columns, not list"),
        ('{"prompt": ""}', ": the prompt in column 'prompt' is empty"),
        ('{"prompt": " "}\n{"prompt": 3}', None),
        ('{"prompt": 3}', ": column 'prompt' must hold text or a list of messages"),
        ('{"prompt": "1\\ud800"}', " holds half of a surrogate pair, which is no text"),
        ('{"promt": "1"}', "; columns: promt"),
    ):
        (tmp_path / "rows.jsonl").write_text("\n".join([*good[:90], "", line, *good[90:]]))
        message = refusal(lambda: read(tokenizer, [f"{tmp_path}/rows.jsonl"], **way))
        if said is None:  # a blank alone is a token of this tokenizer: the row after it is the first bad one
            assert f"{tmp_path}/rows.jsonl:93: column 'prompt'" in message
        else:
            assert f"{tmp_path}/rows.jsonl:92" in message and said in message
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_what_a_reward_refuses_is_named(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [{"prompt": str(i), "answer": str(i)} for i in range(99)]
    rows[70]["answer"] = None
    rows[40] = {"prompt": "1" * 20, "answer": None}  # dropped, so that nobody has to score it
    file, keys = write_rows(tmp_path / "rows.jsonl", rows), {"max_prompt_length": 9, "filter_overlong_prompts": True}
    asked = {**way, **keys}
    message = refusal(lambda: read(tokenizer, [file], reward="exact_match", **asked))
    assert message == f"{file}:71: reward exact_match needs an answer, and the row's is null"
    rows[70]["answer"] = "1"
    found = read(tokenizer, [write_rows(tmp_path / "rows.jsonl", rows)], reward="exact_match", **asked)
    assert len(found) == 98 and found.checked_for == (("exact_match", (), "{}"),)


def test_files_that_are_no_rows(tmp_path: Path, tokenizer: str) -> None:
    for name in ("rows.jsonl.xz", "rows.parquet.zst"):
        (tmp_path / name).write_bytes(b"\x1f\x8b")
        message = refusal(lambda name=name: read(tokenizer, [f"{tmp_path}/{name}"]))  # type: ignore[misc]
        assert message.startswith(f"data.train_files: '{tmp_path}/{name}' is none of .jsonl,")
        assert message.endswith("; unpack it first")
    (tmp_path / "empty.jsonl").write_text("\n")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1"}])
    assert refusal(lambda: read(tokenizer, [rows, f"{tmp_path}/empty.jsonl"])) == (
        f"data.train_files: '{tmp_path}/empty.jsonl' holds no rows"
    )


def test_what_is_left_out_is_said(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    rows = [{"prompt": str(i % 30), "answer": "1", "hard": i % 2} for i in range(100)]
    rows += [{"prompt": "1" * 20, "answer": "1", "hard": 0}, {"prompt": "é" * 20, "answer": "1", "hard": 0}]
    (tmp_path / "own.py").write_text(
        "def easy(row):\n    return row['hard'] == 0\ndef bad(row):\n    return 1 / (3 - int(row['prompt']))\n"
    )
    file = write_rows(tmp_path / "rows.jsonl", rows)
    keys = {**way, "max_prompt_length": 19, "filter_overlong_prompts": True, "drop_duplicates": True}
    found = read(tokenizer, [file], filter=f"{tmp_path}/own.py:easy", **keys)
    assert [p.index for p in found] == [2 * i for i in range(15)]
    assert found.remarks == (
        "data.train_files: 87 of 102 rows left out: 2 over data.max_prompt_length = 19 tokens, 50 by data.filter, "
        "35 whose prompt an earlier row has",
    )
    assert read(tokenizer, [file], **way).remarks == ()
    assert refusal(lambda: read(tokenizer, [file], filter=f"{tmp_path}/own.py:bad", **way)) == (
        f"{file}:4: data.filter = {tmp_path}/own.py:bad failed: ZeroDivisionError: division by zero"
    )
    assert "has no function 'none'; it has easy, bad" in refusal(
        lambda: read(tokenizer, [file], filter=f"{tmp_path}/own.py:none", **way)
    )
    held_out = read(tokenizer, [file], "data.val_files", filter=f"{tmp_path}/own.py:easy", **keys)
    assert len(held_out) == 100  # neither filter nor duplicates: validation compares with other runs


def test_nothing_is_left(tmp_path: Path, tokenizer: str, way: dict[str, Any]) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1" * 9}, {"prompt": "é" * 9}])
    keys = {**way, "max_prompt_length": 8, "filter_overlong_prompts": True, "drop_duplicates": True}
    assert refusal(lambda: read(tokenizer, [file], **keys)) == (
        "data.train_files: none of the 2 prompts has at most data.max_prompt_length = 8 tokens"
    )
    (tmp_path / "own.py").write_text("def none(row):\n    return False\n")
    assert refusal(lambda: read(tokenizer, [file], filter=f"{tmp_path}/own.py:none", **keys)) == (
        "data.train_files: data.filter and data.max_prompt_length = 8 leave none of the 2 prompts"
    )


def test_more_files_than_are_open(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megarl.data.row_set, "OPEN_FILES", 3)
    for i in range(10):
        write_rows(tmp_path / f"{i}.jsonl", [{"prompt": str(i)}] * 2)
    found, before = read(tokenizer, [f"{tmp_path}/*.jsonl"]), len(os.listdir("/proc/self/fd"))
    assert [p.row["prompt"] for p in found] == [str(i // 2) for i in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    (tmp_path / "0.jsonl").unlink()
    with pytest.raises(RowsChanged, match=r"0.jsonl can no longer be read: No such file or directory; put it back"):
        found[0]


def test_prompts_held_out_and_trained_on_are_counted(tmp_path: Path, tokenizer: str) -> None:
    def prompts(name: str, numbers: list[int]) -> PromptSet:
        return read(tokenizer, [write_rows(tmp_path / name, [{"prompt": str(i)} for i in numbers])])

    train, val = prompts("a.jsonl", [*range(100), 5]), prompts("b.jsonl", [5, 5, 7, 200, 300])
    assert val.in_common(train) == 3 and train.in_common(val) == 3 and train.in_common(train) == 101


def test_both_ways_give_the_same(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_rows(tmp_path / "r.jsonl", [{"prompt": f"{i}é" if i % 3 else "1" * i, "x": i} for i in range(1, 99)])
    keys = {"max_prompt_length": 40, "truncation": "middle", "cache_dir": str(tmp_path / "cache")}
    here = read(tokenizer, [file], **keys)
    assert not (tmp_path / "cache").exists()  # small files leave nothing behind
    monkeypatch.setattr(megarl.data.prompts, "SMALL_BYTES", 0)
    there = read(tokenizer, [file], **keys)
    assert list(here) == list(there) and here.digest == there.digest
    assert max(len(p.token_ids) for p in here) == 40


def test_the_digest_is_of_what_is_drawn(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": str(i), "other": str(i), "answer": "1"} for i in range(9)]

    def digest(rows: list[dict[str, str]], **keys: Any) -> str:
        return read(tokenizer, [write_rows(tmp_path / "rows.jsonl", rows)], **keys).digest

    first = digest(rows)
    assert first == digest(rows, max_prompt_length=7) == digest(rows, seed=5, shuffle=False)
    changed = [
        digest([*rows[1:], rows[0]]),
        digest([{**row, "answer": "2"} for row in rows]),
        digest(rows[:-1]),
        digest(rows, prompt_key="other", answer_key="prompt"),
        digest(rows, truncation="left", max_prompt_length=7),
    ]
    assert len({first, *changed}) == 6


def test_a_row_that_changes_while_the_run_goes_on(tmp_path: Path, tokenizer: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": str(i), "answer": "1"} for i in range(10)])
    found = read(tokenizer, [file])
    with open(file, "r+b") as f:  # in its place; a file that replaces it is another one
        f.seek(3 * 28 + 13)
        f.write(b"7")
    assert found[2].row["prompt"] == "2"
    with pytest.raises(RowsChanged, match=r"rows.jsonl:4 is no longer what it was when the run began; put the file"):
        found[3]
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "1"}])
    Path(other).rename(file)
    assert found[2].row["prompt"] == "2"


def test_where_a_row_is_from(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "1", "data_source": "gsm8k", "from": "a"}, {"prompt": "2"}]
    file = write_rows(tmp_path / "aime.2024.jsonl", rows)
    assert [p.data_source for p in read(tokenizer, [file])] == ["gsm8k", "aime.2024"]
    assert [p.data_source for p in read(tokenizer, [file], source_key="from")] == ["a", "aime.2024"]
    nested = write_rows(tmp_path / "n.jsonl", [{"prompt": "1", "extra": {"from": "a"}}])
    assert [p.data_source for p in read(tokenizer, [nested], source_key="extra.from")] == ["a"]


def test_short_text_needs_no_tokens(tokenizer: str) -> None:
    """And what does: what may be too long, or nothing, or what a normalizer may lengthen."""
    asked = Scan(what="", data=DataConfig(max_prompt_length=8), bounded=bounded(load_tokenizer(tokenizer)))
    assert asked.bounded
    needed = {text: asked.needs_tokens(text) for text in ("1234567", "12345678", "  ", "", "é1", "+-+")}
    assert needed == {"1234567": False, "12345678": True, "  ": True, "": True, "é1": True, "+-+": True}
    assert asked.needs_tokens([{"role": "user", "content": "1"}])
    cutting = Scan(what="", data=DataConfig(max_prompt_length=8, truncation="left"), bounded=True)
    assert not cutting.needs_tokens("1" * 999)


def test_conversations_of_known_roles_need_no_tokens(tmp_path: Path) -> None:
    """Those that are long, and the first of each form, do; refusals are of the row that is refused."""
    words = RustTokenizer(models.WordLevel({"<e>": 0, "u": 1, "a": 2, ":": 3, "7": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", unk_token="?")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }} : {{ m['content'] }} {% endfor %}a :"
        "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}"
    )
    fast.save_pretrained(tmp_path)

    def chat(*contents: str) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": content} for content in contents]}

    rows = [chat("7 7"), chat("7"), chat("7 " * 30), chat("7 é"), chat("7", "7"), chat("7 7", "7")]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    found = read(str(tmp_path), [file], max_prompt_length=40)
    assert [int(at >= 0) for at in found._index.rows["tokens_at"]] == [1, 0, 1, 1, 1, 0]
    whole = [fast.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    assert [list(p.token_ids) for p in found] == [list(ids) for ids in whole]
    write_rows(tmp_path / "rows.jsonl", [*rows, chat(*"777")])
    assert refusal(lambda: read(str(tmp_path), [file], max_prompt_length=40)) == (
        f"{file}:7: the chat template refuses the messages: too long"
    )
    batch = load_tokenizer(str(tmp_path))
    texts = ["7 a :", "", "u"]
    assert list(batch.encode_batch(texts)) == [batch.encode(text) for text in texts] and not batch.encode_batch([])


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters(max_codepoint=127), min_size=1, max_size=40))
def test_ascii_is_bounded(tokenizer: str, text: str) -> None:
    assert len(load_tokenizer(tokenizer).encode(text)) <= len(text) + 1


def test_a_source_of_ones_own(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "rows.py"
    code.write_text(
        "import os\n"
        "def made():\n"
        "    open(os.environ['CALLS'], 'a').write('.')\n"
        "    for i in range(100):\n"
        "        yield {'prompt': f'{i}+{i}', 'answer': 2 * i}\n"
        "class Indexed:\n"
        "    def __len__(self): return 7\n"
        "    def __getitem__(self, i): return {'prompt': str(i), 'data_source': 'own'}\n"
        "def fails():\n    yield {'prompt': '1'}\n    raise KeyError('x')\n"
        "def leaves(): raise SystemExit(0)\n"
        "def keep(row): raise SystemExit(0)\n"
        "def texts(): return ['1']\n"
        "def sets(): return [{'prompt': '1', 'x': {1}}]\n"
        "def nothing(): return None\n"
        "def empty(): return []\n"
    )
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def of(name: str) -> PromptSet:
        return read(tokenizer, [], source=f"{code}:{name}", cache_dir=str(tmp_path / "cache"))

    made = of("made")
    assert len(made) == 100 and made[99].row == {"prompt": "99+99", "answer": 198}
    assert made[4].source == f"{code}:made:5" and made[4].data_source == "rows"
    assert "asked once" in made.remarks[0]
    assert len(of("made")) == 100 and (tmp_path / "calls").read_text() == "."
    code.write_text(code.read_text() + "made.version = 2\n")
    assert len(of("made")) == 100 and (tmp_path / "calls").read_text() == ".."
    assert [p.data_source for p in of("Indexed")] == ["own"] * 7
    where = f"data.source: {code}"
    assert refusal(lambda: of("fails")) == f"data.source = {code}:fails failed after 1 rows: KeyError: 'x'"
    assert refusal(lambda: of("leaves")) == f"data.source = {code}:leaves failed after 0 rows: SystemExit: 0"
    kept = refusal(lambda: read(tokenizer, [], source=f"{code}:Indexed", filter=f"{code}:keep"))
    assert kept.endswith(f"data.filter = {code}:keep failed: SystemExit: 0")
    assert refusal(lambda: of("texts")) == f"{where}:texts:1 must be a mapping of columns, not str"
    assert refusal(lambda: of("sets")).startswith(f"{where}:sets:1 cannot be written as JSON")
    assert refusal(lambda: of("nothing")).endswith("TypeError: it gives NoneType, no rows")
    assert refusal(lambda: of("empty")) == f"data.source: '{code}:empty' holds no rows"
    assert "both name the training rows" in refusal(lambda: read(tokenizer, ["x"], source=f"{code}:made"))

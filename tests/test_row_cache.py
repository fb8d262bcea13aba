"""The index on disk: whole or not there, made once by whoever comes first, whatever happens to its maker."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from prompt_rows import outcome, read, start_reader, write_rows, write_tokenizer
from pyarrow import parquet
from selection import quick

import megarl.data.prompts
from megarl.data import row_cache
from megarl.data.row_files import RowsChanged

WAITS = """
import os, time
def keep(row):
    open(os.environ["STARTED"], "a").write(f"{os.getpid()} ")
    end = time.monotonic() + 300
    while not os.path.exists(os.environ["GO"]) and time.monotonic() < end:
        time.sleep(0.02)
    return True
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}é", "answer": str(i)} for i in range(300)])


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Keys of a read whose first row takes until GO is there."""
    (tmp_path / "own.py").write_text(WAITS)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    return {"filter": f"{tmp_path}/own.py:keep", "cache_dir": str(tmp_path / "cache")}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size, a file is read by way of the cache."""
    monkeypatch.setattr(megarl.data.prompts, "SMALL_BYTES", 0)


def until(there: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.slow
def test_a_maker_that_is_killed(tmp_path: Path, tokenizer: str, file: str, waiting: dict[str, str]) -> None:
    """Its helpers go with it; what it left is removed, and never used."""
    first = start_reader(tokenizer, [file], **waiting)
    started = tmp_path / "started"
    until(lambda: started.exists() and started.read_text().endswith(" "))
    helpers = psutil.Process(first.pid).children()
    assert helpers
    first.kill()
    first.wait()
    until(lambda: not any(h.is_running() and h.status() != psutil.STATUS_ZOMBIE for h in helpers))
    (left,) = entries(tmp_path / "cache")
    assert ".tmp-" in left
    (tmp_path / "cache" / f"{0:032x}.tmp-x").mkdir()  # of another entry, whose maker is gone too
    (tmp_path / "go").touch()
    code, found, said = outcome(start_reader(tokenizer, [file], **waiting))
    assert (code, found[0], said) == (0, 300, "")
    assert entries(tmp_path / "cache") == [left.partition(".")[0]]


@pytest.mark.slow
def test_two_makers_at_once(tmp_path: Path, tokenizer: str, file: str, waiting: dict[str, str]) -> None:
    """One of them makes it; the other one waits, also if the first is killed meanwhile."""
    started = tmp_path / "started"
    first = start_reader(tokenizer, [file], **waiting)
    until(lambda: started.exists() and started.read_text().endswith(" "))
    others = [start_reader(tokenizer, [file], **waiting) for _ in range(2)]
    until(lambda: all(_holds(other, ".lock") for other in others))
    time.sleep(0.3)
    before = started.read_text().split()
    assert len(before) == 1
    first.kill()
    until(lambda: len(started.read_text().split()) == 2)
    (tmp_path / "go").touch()
    results = [outcome(other) for other in others]
    assert [code for code, _, _ in results] == [0, 0] and results[0][1] == results[1][1]
    assert len(started.read_text().split()) == 1 + 300  # the first row twice, every other once
    outcome(first)


def _holds(process: subprocess.Popen[str], ending: str) -> bool:
    return any(one.path.endswith(ending) for one in psutil.Process(process.pid).open_files())


@pytest.mark.slow
def test_a_maker_that_is_stuck(
    tmp_path: Path, tokenizer: str, file: str, waiting: dict[str, str], large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(row_cache, "SAY_AFTER_SECONDS", 0.1)
    started = tmp_path / "started"
    stuck = start_reader(tokenizer, [file], **waiting)
    until(lambda: started.exists() and started.read_text().endswith(" "))
    stuck.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match=rf"^data.train_files: pid {stuck.pid} on \S+ reads the rows, without progre"):
        read(tokenizer, [file], **waiting)
    stuck.kill()
    outcome(stuck)


@pytest.mark.slow
def test_a_helper_that_is_killed(tmp_path: Path, tokenizer: str, file: str, waiting: dict[str, str]) -> None:
    maker, started = start_reader(tokenizer, [file], **waiting), tmp_path / "started"
    until(lambda: started.exists() and started.read_text().endswith(" "))
    os.kill(int(started.read_text()), signal.SIGKILL)
    code, _, said = outcome(maker)
    assert code == 1 and said == (
        "refused: data.train_files: a process that read the rows was killed by SIGKILL; start again, with more memory\n"
    )
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", quick(["shorter", "gone", "meta"], 0))
def test_an_entry_that_is_not_whole_is_made_again(
    tmp_path: Path, tokenizer: str, file: str, large: None, damage: str
) -> None:
    cache = tmp_path / "cache"
    first = list(read(tokenizer, [file], cache_dir=str(cache)))
    (entry,) = entries(cache)
    victim = cache / entry / ("meta.json" if damage == "meta" else "rows.bin")
    if damage == "gone":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size // 2)
    assert list(read(tokenizer, [file], cache_dir=str(cache))) == first
    assert row_cache.is_whole(cache / entry) and entries(cache) == [entry]


def test_a_warm_start_writes_nothing(tmp_path: Path, tokenizer: str, file: str, large: None) -> None:
    cache = tmp_path / "cache"
    read(tokenizer, [file], cache_dir=str(cache))
    for lock in cache.glob("*.lock"):
        lock.unlink()

    def seen() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in cache.rglob("*"))

    before = seen()
    found = read(tokenizer, [file], cache_dir=str(cache))
    assert seen() == before and found[7].row["answer"] == "7"
    assert not any(one.path.startswith(str(cache)) and one.mode != "r" for one in psutil.Process().open_files())


def test_a_file_that_is_replaced_with_its_size_and_time(tmp_path: Path, tokenizer: str, file: str, large: None) -> None:
    """As `rsync -t` does: its index is made again."""
    cache, status = tmp_path / "cache", os.stat(file)
    assert read(tokenizer, [file], cache_dir=str(cache))[7].row["prompt"] == "7é"
    text = Path(file).read_bytes().replace(b'"7\xc3\xa9"', b'"8\xc3\xa9"')
    Path(file).write_bytes(text)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (os.stat(file).st_size, os.stat(file).st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert read(tokenizer, [file], cache_dir=str(cache))[7].row["prompt"] == "8é"
    assert len(entries(cache)) == 2


def altered(path: Path, before: bytes, after: bytes) -> None:
    content = path.read_bytes()
    assert content.count(before) == 1 and len(before) == len(after)
    path.write_bytes(content.replace(before, after))


def test_cached_rows_that_are_altered_are_not_trained_on(tmp_path: Path, tokenizer: str, large: None) -> None:
    """The copy of a Parquet file, what the index says of a row, and its tokens."""
    source = str(tmp_path / "rows.parquet")
    prompts = [f"{i}é" for i in range(300)]
    parquet.write_table(pa.table({"prompt": prompts, "answer": list(map(str, range(300)))}), source)
    keys = {"cache_dir": str(tmp_path / "cache")}
    whole = read(tokenizer, [source], **keys)
    assert [whole[i].row["prompt"] for i in (7, 123)] == ["7é", "123é"]
    (entry,) = (tmp_path / "cache" / name for name in entries(tmp_path / "cache"))
    whole_bytes = {name: (entry / name).read_bytes() for name in ("0.arrow", "rows.bin", "tokens.bin")}
    ids = np.array(whole[123].token_ids, "<i4").tobytes()
    altered(entry / "0.arrow", "122é123é124é".encode(), "122é723é124é".encode())
    found = read(tokenizer, [source], **keys)
    assert found[7].row["prompt"] == "7é"
    with pytest.raises(
        RowsChanged, match=r"rows.parquet row 124: the copy of it in '.*0.arrow' is no longer what was w"
    ):
        found[123]
    (entry / "0.arrow").write_bytes(whole_bytes["0.arrow"])
    altered(entry / "tokens.bin", ids, bytes([ids[0] ^ 1]) + ids[1:])
    with pytest.raises(RowsChanged, match=rf"'{entry}' is no longer what was written there; remove it and start again"):
        read(tokenizer, [source], **keys)[123]
    (entry / "tokens.bin").write_bytes(whole_bytes["tokens.bin"])
    for place in range(64):  # every byte of what is known of row 124
        content = bytearray(whole_bytes["rows.bin"])
        content[123 * 64 + place] ^= 16
        (entry / "rows.bin").write_bytes(content)
        found = read(tokenizer, [source], **keys)
        assert found[7].row["prompt"] == "7é"
        with pytest.raises(RowsChanged):
            found[123]
    (entry / "rows.bin").write_bytes(whole_bytes["rows.bin"])
    assert read(tokenizer, [source], **keys)[123].token_ids == whole[123].token_ids


def test_a_cached_copy_that_is_no_arrow_file(tmp_path: Path, tokenizer: str, large: None) -> None:
    source, keys = str(tmp_path / "rows.parquet"), {"cache_dir": str(tmp_path / "cache")}
    parquet.write_table(pa.table({"prompt": ["1", "2"]}), source)
    assert len(read(tokenizer, [source], **keys)) == 2
    (entry,) = (tmp_path / "cache" / name for name in entries(tmp_path / "cache"))
    content = (entry / "0.arrow").read_bytes()
    for place in range(
        0, len(content), 3
    ):  # offsets, lengths and types, too: no crash, and nothing that is read wrongly
        spoilt = bytearray(content)
        spoilt[place] ^= 255
        (entry / "0.arrow").write_bytes(spoilt)
        try:
            found = read(tokenizer, [source], **keys)
            assert [found[i].row["prompt"] for i in (0, 1)] == ["1", "2"]
        except RowsChanged as e:
            assert "rows.parquet" in str(e) and "\n" not in str(e)


def test_another_file_or_key_is_another_entry(tmp_path: Path, tokenizer: str, file: str, large: None) -> None:
    keys: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    assert len(read(tokenizer, [file], **keys)) == 300
    with open(file, "a") as f:
        f.write(json.dumps({"prompt": "1+1"}) + "\n")
    assert len(read(tokenizer, [file], **keys)) == 301
    assert len(read(tokenizer, [file], max_prompt_length=3, filter_overlong_prompts=True, **keys)) == 101
    assert len(read(tokenizer, [file], max_prompt_length=3, truncation="left", **keys)[200].token_ids) == 3
    code = tmp_path / "own.py"
    for number in (1, 2):
        code.write_text(f"def keep(row):\n    return row['prompt'].startswith('{number}')\n")
        found = read(tokenizer, [file], filter=f"{code}:keep", **keys)
        assert {prompt.row["prompt"][0] for prompt in found} == {str(number)}


def test_a_folder_that_cannot_be_written(tmp_path: Path, tokenizer: str, file: str, large: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError) as refused:
        read(tokenizer, [file], cache_dir=f"{tmp_path}/file/cache")
    assert str(refused.value) == (
        f"data.train_files: the rows cannot be kept in '{tmp_path}/file/cache': Not a directory; set data.cache_dir to "
        "a folder with more room, or one that can be written to"
    )


def test_a_disk_that_is_full(tmp_path: Path, tokenizer: str, file: str, large: None) -> None:
    """As far as a process can tell: no file may grow beyond 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=r"^data.train_files: the rows cannot be kept in '.*': File too large; set"
        ):
            read(tokenizer, [file], cache_dir=str(tmp_path / "cache"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert entries(tmp_path / "cache") == []
    assert len(read(tokenizer, [file], cache_dir=str(tmp_path / "cache"))) == 300


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert row_cache.cache_folder("") == Path("/somewhere/megarl/rows") and row_cache.cache_folder("a") == Path("a")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert row_cache.cache_folder("") == Path("/home/ada/.cache/megarl/rows")

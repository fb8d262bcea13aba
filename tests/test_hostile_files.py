"""Files that nobody should write: each is read, or refused in one line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hostile_kinds import KINDS
from huggingface_cases import write_folder as write_model
from prompt_rows import read_rows
from report_runs import rollout, write_folder, write_rollouts
from selection import quick
from test_data import message

from megarl.checkpoint.safetensors_file import read_header
from megarl.cli.main import main
from megarl.config.load import build_config, load_config
from megarl.evaluation.records import Record, read_records
from megarl.telemetry.lines import complete_lines
from megarl.trainer.admission.telemetry import check_telemetry

ROOT = Path(__file__).parents[1]
QUICK = ("safetensors", "model_folder", "sentencepiece", "manifest", "jsonl")
"""Kinds that are read in milliseconds: 300 cases of them together in the quick selection."""
MANY = int(os.environ.get("HOSTILE_CASES", "60"))
"""Cases of a kind in the slow tests; with 910 there are 10,000 of all kinds together."""


def run_cases(folder: Path, cases: int, *kinds: str) -> list[dict[str, Any]]:
    """What a process of its own counts, kind by kind."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "hostile_cases.py", folder, str(cases), *kinds],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    how = signal.Signals(-ended.returncode).name if ended.returncode < 0 else ended.returncode
    assert ended.returncode == 0, f"{how}\n{ended.stdout}\n{ended.stderr[-5000:]}"
    counts = [json.loads(line) for line in ended.stdout.splitlines() if line[:1] == "{"]  # libraries speak, too
    for one, kind in zip(counts, kinds, strict=True):
        assert one["kind"] == kind and one["cases"] >= cases and one["most"] < 2 * 2**30, one
    return counts


def test_some_files(tmp_path: Path) -> None:
    counts = run_cases(tmp_path, 60, *QUICK)
    assert sum(one["refused"] for one in counts) > 100  # the cases do spoil the files


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_files_of_a_kind(tmp_path: Path, kind: str) -> None:
    run_cases(tmp_path, MANY // 4 if kind == "cached" else MANY, kind)  # each of `cached` starts processes


@pytest.mark.parametrize("length", [20 * 2**30, 100_000_001, 2**63])
def test_a_header_that_is_too_long(tmp_path: Path, length: int) -> None:
    """The file is sparse: it has the size, and takes no room."""
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as f:
        f.write(struct.pack("<Q", length))
        f.truncate(min(length + 8, 21 * 2**30))
    assert message(lambda: read_header(str(file))) == (
        f"'{file}' is not a safetensors file: its header would have {length} bytes"
    )


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "I8", "shape": [2**64], "data_offsets": [0, 4]},
        {"dtype": "I8", "shape": [4], "data_offsets": [4, 0]},
        {"dtype": "I8", "shape": [1] * 1000, "data_offsets": [0, 4]},
    ],
)
def test_a_header_with_sizes_that_are_none(tmp_path: Path, tensor: dict[str, Any]) -> None:
    write_model(tmp_path, "qwen2")
    text = json.dumps({"x": tensor}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    assert "is not a safetensors file: x " in message(lambda: read_header(str(tmp_path / "model.safetensors")))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: " + "[" * 500, "nested more than 100 deep"),
        ("a: " + "[" * 100_000, "epth in|nested more than 100 deep"),  # some parsers have a limit of their own
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
            "stands for more than 1048576 nodes, its aliases written out",
        ),
        ("a: &a [*a]", "stands for more than 1048576 nodes"),
        ("#" * 2**20 + "\na: 1", "has more than 1048576 bytes"),
    ],
)
def test_yaml_that_is_more_than_it_looks(
    tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_folder(tmp_path / "run", steps=2)
    (run / "config.yaml").write_text(text)
    assert re.search(why, message(lambda: load_config(str(run / "config.yaml"))))
    assert main(["runs", str(tmp_path)]) == main(["report", str(run)]) == 0  # what else is there is shown
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("begin", "listed"), quick(product(["a0: [x, y]", f"a0: {'x' * 100}"], [True, False]), 0))
def test_interpolations_that_multiply(tmp_path: Path, begin: str, listed: bool) -> None:
    """In any order: 900 letters stand for a million million."""
    lines = [begin]
    for i in range(1, 12):
        one = f"${{a{i - 1}}}"
        lines.append(f"a{i}: " + (f"[{', '.join([repr(one)] * 9)}]" if listed else one * 9))
    for order in (lines, lines[::-1]):
        (tmp_path / "run.yaml").write_text("\n".join(order))
        said = message(lambda: load_config(str(tmp_path / "run.yaml")))
        assert "its interpolations written out" in said, said
    (tmp_path / "run.yaml").write_text("b: x\na: " + "${b} " * 2000)
    assert "more than 1000 interpolations" in message(lambda: load_config(str(tmp_path / "run.yaml")))


def test_files_that_do_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe, a device and two sparse gigabytes hide no other run."""
    whole = write_folder(tmp_path / "whole", steps=2)
    for name, file in (("pipe", "metrics.jsonl"), ("settings", "config.yaml"), ("device", "metrics.jsonl")):
        there = write_folder(tmp_path / name, steps=2) / file
        there.unlink(missing_ok=True)
        if name == "device":
            there.symlink_to("/dev/zero")
        else:
            os.mkfifo(there)
    assert main(["runs", str(tmp_path)]) == 0
    assert "whole" in capsys.readouterr().out
    rows = (whole / "metrics.jsonl").read_bytes()
    os.truncate(whole / "metrics.jsonl", 2 << 30)
    first, second, damaged = complete_lines(str(whole / "metrics.jsonl"))
    assert [first, second] == rows.splitlines(keepends=True) and len(damaged) == 101


@pytest.mark.parametrize("score", ["1" + "0" * 400, "1e308", '"x"', "[" * 100_000])
def test_samples_that_no_evaluation_wrote(tmp_path: Path, score: str) -> None:
    text = dict.fromkeys(("source", "row", "prompt", "response", "answer", "vote", "finish"), "")
    record = asdict(Record(index=0, sample=0, tokens=1, score=None, **text))
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(record).replace("null", score) + "\n")
    assert message(lambda: read_records(str(path))) == f"{path}:1 is no sample that megarl eval writes; evaluate again"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": "1+1=", "answer": "\\ud800"}', "holds half of a surrogate pair, which is no text"),
        ('{"prompt": "1+1=", "data_source": "x\\uDC00"}', "holds half of a surrogate pair, which is no text"),
        ('{"prompt": "1+1=", "x": ' + "[" * 500 + "]" * 500 + "}", "is nested more than 100 deep"),
    ],
)
def test_rows_that_end_a_run_later(tmp_path: Path, row: str, why: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "\\ud83d\\ude00", "x": [[1]]}\n' + row + "\n")
    said = message(lambda: read_rows([str(tmp_path / "rows.jsonl")], "data.train_files"))
    assert said == f"data.train_files: {tmp_path}/rows.jsonl:2 {why}"


def test_metrics_whose_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    config = build_config({"trainer": {"default_local_dir": str(tmp_path), "logger": ["jsonl"]}})
    assert message(lambda: check_telemetry(config)) == (
        f"'{tmp_path}/metrics.jsonl' is a folder; move it away, or set another trainer.default_local_dir"
    )


def test_a_rollout_whose_turns_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_folder(tmp_path / "run", steps=2)
    write_rollouts(run, 1, [rollout(1, 0, turns=value) for value in (5, True, "ab", {"a": 1}, [["user", "x"]])])
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""

"""Files that nobody should write: each is read, or refused in one line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_kinds import KINDS
from huggingface_cases import write_folder as write_model
from report_runs import rollout, write_folder, write_rollouts
from test_data import message

from megarl.checkpoint.safetensors_file import read_header
from megarl.cli.main import main
from megarl.config.load import build_config, load_config
from megarl.trainer.telemetry_checks import check_telemetry

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
    counts = [json.loads(line) for line in ended.stdout.splitlines()]
    for one, kind in zip(counts, kinds, strict=True):
        assert one["kind"] == kind and one["cases"] >= cases and one["most"] < 2 * 2**30, one
    return counts


def test_some_files(tmp_path: Path) -> None:
    counts = run_cases(tmp_path, 60, *QUICK)
    assert sum(one["refused"] for one in counts) > 100  # the cases do spoil the files


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_files_of_a_kind(tmp_path: Path, kind: str) -> None:
    run_cases(tmp_path, MANY, kind)


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
        ("a: " + "[" * 100_000, "nested more than 100 deep"),
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
    assert why in message(lambda: load_config(str(run / "config.yaml")))
    assert main(["runs", str(tmp_path)]) == main(["report", str(run)]) == 0  # what else is there is shown
    assert capsys.readouterr().err == ""


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

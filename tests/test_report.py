"""`megarl report`: what is read of runs, and what is refused; `test_report_page.py` has the page."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import rollout, write_folder, write_rollouts

from megarl.cli.main import main
from megarl.report.blocks import Blocks
from megarl.report.runs import runs_at


def blocks_of(*folders: Path) -> dict[str, Any]:
    found = Blocks(runs_at([str(folder) for folder in folders])).refresh()
    return {name: json.loads(gzip.decompress(block.data)) for name, block in found.items()}


def test_runs_get_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    a, b, c = (write_folder(tmp_path / name, steps=1) for name in ("a/run", "b/run", "c"))
    assert [run.name for run in runs_at([str(a), str(a) + "/", str(c)])] == ["run", "c"]
    assert [run.name for run in runs_at([str(a), str(b), str(c)])] == ["a/run", "b/run", f"{tmp_path.name}/c"]


def test_curves_have_gaps_and_say_what_is_damaged(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=3)
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "reward/mean": null, "note": "text"}\nnonsense\n{"step": 2, "reward/mean": 9}\n')
        f.write('{"step": 5, "reward/mean": NaN, "huge": 1' + "0" * 400 + '}\n{"step": 6')
    curves = blocks_of(run)["curves-0"]
    assert curves["steps"] == [1, 2, 3, 4, 5] and curves["damaged"] == 1
    assert curves["columns"]["reward/mean"] == [None, [0.3333333333, 9, 1.0, None, None]]
    assert curves["columns"]["huge"] == [[4], [None]]
    assert curves["columns"]["val/accuracy"] == [[2], [0.75]] and "note" not in curves["columns"]


def test_settings_tell_what_differs(tmp_path: Path) -> None:
    own = {"actor_rollout_ref": {"actor": {"megatron": {"tensor_model_parallel_size": 2}, "optim": {"lr": 0.5}}}}
    runs = write_folder(tmp_path / "a", steps=1), write_folder(tmp_path / "b", steps=1, **own)
    (runs[0] / "config.yaml").write_text((runs[0] / "config.yaml").read_text() + "of_before: {key: 3}\n")
    found = blocks_of(*runs)["settings"]
    rows = {row[0]: row[1:] for row in found["rows"]}
    lr = rows["actor_rollout_ref.actor.optim.lr"]
    assert lr[1:] == ["1e-06", ["1e-06", "0.5"], [False, True]]
    sizes = "megatron.tensor_model_parallel_size"
    assert rows[f"actor_rollout_ref.actor.{sizes}"][2:] == [["1", "2"], [False, True]]
    assert rows[f"critic.{sizes}"][2:] == [["1", "2"], [False, False]]  # as the actor, which is its default
    assert rows["of_before.key"] == ["", None, ["3", None], [True, False]]
    (runs[0] / "config.yaml").write_text("a: [")
    (runs[1] / "config.yaml").unlink()
    unreadable = blocks_of(*runs)["settings"]["unreadable"]
    assert unreadable[0].startswith("config.yaml cannot be read") and unreadable[1] == "config.yaml is not there"


def test_a_lock_of_many_brackets_is_no_lock(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=1)
    (run / "lock").write_text("[" * 4096)
    assert blocks_of(run)["starts-0"]["total"] == 0


def test_records_of_before_and_damaged_ones(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=2)
    old = {"prompt": "1 + 1 =", "response": "zwölf", "answer": "2", "reward": None}
    path = write_rollouts(run, 2, [old, rollout(2, 1, tokens=["a"], logp=["x"], parts={"p": "high"}, length="long")])
    with open(path, "a") as f:
        f.write('nonsense\n[1]\n{"prompt": 1, "response": ""}\n{"prompt": "p", "response": "r", "reward": "x"}\n{"cut')
    found = blocks_of(run)
    index = found["rollouts-0"]
    assert index["damaged"] == 4 and index["columns"]["step"] == [1, 1, 1, 1, 2, 2] and index["chunks"] == [6]
    assert index["columns"]["reward"][4:] == [None, 0.0] and index["columns"]["length"][4:] == [-1, -1]
    assert index["prompts"] == [[1, "1 + 1 ="], [-1, "1 + 1 ="], [2, "2 + 2 ="]]
    assert found["texts-0-0"][4] == "zwölf"
    kept, damaged = found["details-0-0"][4:]
    assert kept == {"answer": "2"} and damaged == {"answer": "6", "tokens": ["a"]}  # columns of another length are left


def test_what_a_run_took_back_is_left_out(tmp_path: Path) -> None:
    """It went back to step 2: step 3, under way again, may have rollouts; what is there of 4 and 5 is of before."""
    run = write_folder(tmp_path / "run", steps=5)
    blocks = Blocks(runs_at([str(run)]))
    before = blocks.refresh()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    after = blocks.refresh()
    index = json.loads(gzip.decompress(after["rollouts-0"].data))
    assert index["columns"]["step"] == [1] * 4 + [2] * 4 + [3] * 4
    steps = json.loads(gzip.decompress(after["timeline-0"].data))["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    assert after["settings"] is before["settings"] and after["memory-0"] is before["memory-0"]  # not made again


def test_chunks_stay_as_they_are_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.report.rollout_index._BATCH_BYTES", 2000)  # two files or so
    run = write_folder(tmp_path / "run", steps=9)
    blocks = Blocks(runs_at([str(run)]))
    before = blocks.refresh()
    write_rollouts(run, 10, [rollout(10, 0)])
    after = blocks.refresh()
    changed = {name for name in after if name not in before or after[name].version != before[name].version}
    chunks = [name for name in after if name.startswith("details-0-")]
    assert len(chunks) > 3 and {name for name in changed if "-0-" in name} <= {chunks[-1], f"texts-0-{len(chunks) - 1}"}
    assert "rollouts-0" in changed and "curves-0" not in changed


def test_a_run_that_has_just_begun_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        runs_at([str(tmp_path)])
    found = Blocks(runs_at([str(tmp_path)], may_be_empty=True)).refresh()
    values = {name: json.loads(gzip.decompress(block.data)) for name, block in found.items()}
    assert values["curves-0"]["steps"] == values["timeline-0"]["steps"] == values["rollouts-0"]["prompts"] == []
    assert values["memory-0"] is None


@pytest.mark.parametrize("text", ["nonsense", "[]", "{}", '{"phases": {"update": 3}}', '{"phases": {}, "bytes": NaN}'])
def test_a_damaged_prediction_is_none(text: str, tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=1)
    (run / "memory.json").write_text(text)
    assert blocks_of(run)["memory-0"] is None


def nothing(folder: Path) -> str:
    return str(folder / "nothing")


def a_file(folder: Path) -> str:
    (folder / "file").write_text("")
    return str(folder / "file")


def no_metrics(folder: Path) -> str:
    (folder / "empty").mkdir()
    return str(folder / "empty")


def only_damaged(folder: Path) -> str:
    run = write_folder(folder / "damaged", steps=1)
    (run / "metrics.jsonl").write_text("nonsense\n{\n")
    return str(run)


REFUSED: list[tuple[Callable[[Path], str], list[str], str]] = [
    (nothing, [], "is not there; name the folder that"),
    (a_file, [], "is a file, not a run's folder"),
    (no_metrics, [], "holds no metrics.jsonl: no run, or one whose trainer.logger has no jsonl"),
    (no_metrics, ["--serve", "0"], "holds no metrics.jsonl"),
    (only_damaged, [], "has no row of metrics that can be read"),
    (lambda folder: str(write_folder(folder / "run", steps=1)), ["--out", "/nowhere/at/all.html"], "cannot be written"),
    (lambda folder: str(write_folder(folder / "run", steps=1)), ["--serve", "99999"], "port 99999 of 127.0.0.1 cannot"),
]


@pytest.mark.parametrize(("make", "options", "said"), REFUSED)
def test_bad_input_gets_a_line(
    make: Callable[[Path], str], options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", make(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megarl: error: ") and said in error and error.count("\n") == 1


def test_a_report_replaces_no_pipe_and_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_folder(tmp_path / "run", steps=1))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        assert main(["report", run, "--out", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert "cannot be written (a link, pipe, device or folder has that name)" in error and error.count("\n") == 1
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


def test_a_report_of_one_run_is_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_folder(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert capsys.readouterr().out == f"{run}/report.html ({len(text.encode()) / 2**20:.1f} MiB, 1 run)\n"
    assert "http://" not in text and "https://" not in text  # nothing of it is elsewhere
    assert sorted(path.name for path in run.iterdir()) == [
        *("config.yaml", "metrics.jsonl", "report.html", "rollouts", "timeline")
    ]

"""Timers, metric files and their resumption, progress, samples."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import threading
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_disk import fill, small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import TrainedRun

from megarl.config import Config
from megarl.config.trainer import TrainerConfig
from megarl.telemetry.earlier import set_aside_earlier_run
from megarl.telemetry.progress import Progress, duration
from megarl.telemetry.samples import Sample, write_samples
from megarl.telemetry.sinks import open_sinks
from megarl.telemetry.timers import PhaseTimers, Stopwatch
from megarl.trainer.records.report import Report


def test_phases_do_not_overlap() -> None:
    timers = PhaseTimers(torch.device("cpu"))
    started = time.perf_counter()
    with timers("generate"):
        time.sleep(0.02)
        with timers("reshard"):
            time.sleep(0.05)
        time.sleep(0.01)
    with timers("generate"):
        time.sleep(0.01)
    whole = time.perf_counter() - started
    seconds = timers.collect()
    assert list(seconds) == ["generate", "reshard"]
    assert seconds["generate"] >= 0.04 and seconds["reshard"] >= 0.05
    assert sum(seconds.values()) <= whole
    assert timers.collect() == {}


def test_of_a_phase_timed_as_a_whole_all_time_counts_for_itself() -> None:
    timers = PhaseTimers(torch.device("cpu"))
    with timers("generate"):
        time.sleep(0.01)
    with timers("validate", whole=True), timers("generate"), timers("reshard"):
        time.sleep(0.05)
        assert timers.phase == "validate"
    with timers("generate"):
        assert timers.phase == "generate"
    seconds = timers.collect()
    assert list(seconds) == ["generate", "validate"] and seconds["validate"] >= 0.05 > seconds["generate"]


def test_what_a_validation_generates_is_timed_as_validation(small: TrainedRun) -> None:
    before, *steps = ({name for name in row if name.startswith("timing/")} for row in small.rows)
    assert before == {"timing/validate_s", "timing/step_s"} and small.rows[0]["timing/validate_s"] > 0
    assert all({"timing/generate_s", "timing/validate_s"} < step for step in steps) and len(steps) == 2


def test_a_stopwatch_measures_its_last_block() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    assert stopwatch.seconds == 0
    with stopwatch:
        time.sleep(0.05)
    assert stopwatch.seconds >= 0.05
    began = time.perf_counter()
    with pytest.raises(KeyError), stopwatch:
        raise KeyError
    assert stopwatch.seconds <= time.perf_counter() - began


def test_timer_survives_an_error_inside() -> None:
    timers = PhaseTimers(torch.device("cpu"))
    began = time.perf_counter()
    with pytest.raises(KeyError), timers("a"), timers("b"):
        raise KeyError
    whole = time.perf_counter() - began
    time.sleep(0.2)  # belongs to no phase
    assert sum(timers.collect().values()) <= whole


def log_run(run_dir: Path, first_step: int | None, steps: range, names: tuple[str, ...]) -> None:
    sinks = open_sinks(["console", *names], str(run_dir), first_step)
    for step in steps:
        row = {"warmup/step": step + 3.0} if step <= 0 else {"reward/mean": step / 8}
        if step == 4:
            row["val/accuracy"] = 0.5
        for sink in sinks:
            sink.log(step, row)
    for sink in sinks:
        sink.close()


def jsonl(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_resume_drops_what_will_be_logged_again(tmp_path: Path) -> None:
    log_run(tmp_path, -2, range(-2, 6), ("jsonl",))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "rew')  # killed while writing
    log_run(tmp_path, 3, range(3, 5), ("jsonl",))
    rows = jsonl(tmp_path)
    assert [row["step"] for row in rows] == [-2, -1, 0, 1, 2, 3, 4]
    assert rows[0] == {"step": -2, "warmup/step": 1.0} and rows[-1]["val/accuracy"] == 0.5
    log_run(tmp_path, 0, range(0, 2), ("jsonl",))  # within the warm-up
    assert [row["step"] for row in jsonl(tmp_path)] == [-2, -1, 0, 1]


def test_jsonl_row_is_written_at_once_and_stays_json(tmp_path: Path) -> None:
    (sink,) = open_sinks(["jsonl"], str(tmp_path), 1)
    sink.log(1, {"loss": math.nan, "norm": math.inf, "reward": torch.tensor(0.25).item()})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "norm": null, "reward": 0.25}\n'
    sink.close()


def test_csv_header_grows_and_resumes(tmp_path: Path) -> None:
    log_run(tmp_path, 1, range(1, 6), ("csv",))
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,reward/mean,val/accuracy", "1,0.125,", "2,0.25,", "3,0.375,", "4,0.5,0.5", "5,0.625,"
    ]  # fmt: skip
    log_run(tmp_path, 3, range(3, 5), ("csv",))
    with open(tmp_path / "metrics.csv") as f:
        assert [(row["step"], row["val/accuracy"]) for row in csv.DictReader(f)] == [
            ("1", ""), ("2", ""), ("3", ""), ("4", "0.5")
        ]  # fmt: skip
    log_run(tmp_path, 1, range(1, 2), ("csv",))
    assert (tmp_path / "metrics.csv").read_text() == "step,reward/mean\n1,0.125\n"


def test_tensorboard_resume_purges(tmp_path: Path) -> None:
    log_run(tmp_path, 1, range(-2, 6), ("tensorboard",))
    log_run(tmp_path, 3, range(3, 4), ("tensorboard",))
    # its readers take event files by name, which begins with the second of their creation
    for file in (tmp_path / "tensorboard").iterdir():
        part = file.name.rsplit(".", 1)[-1]
        file.rename(file.with_name(f"events.out.tfevents.{1_000_000_000 + int(part)}"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert [e.step for e in events.Scalars("warmup/step")] == [-2, -1, 0]


def test_damaged_lines_are_left_out_and_kept_beside(tmp_path: Path) -> None:
    log_run(tmp_path, None, range(1, 4), ("jsonl", "csv"))
    for name in ("metrics.jsonl", "metrics.csv"):
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        bad = [b"\0\0\0\n", b"garbage\n", b'{"step": 2, "rew\n', b"\xff\xfe,1\n", b"[1]\n"]
        (tmp_path / name).write_bytes(b"".join([*lines[:-1], *bad, *lines[-1:]]) + b"half a l")
    said: list[str] = []
    damaged = (tmp_path / "metrics.jsonl").read_bytes()
    for sink in open_sinks(["jsonl", "csv"], str(tmp_path), 4, said.append):
        sink.log(4, {"reward/mean": 0.5})
        sink.close()
    assert [row["step"] for row in jsonl(tmp_path)] == [1, 2, 3, 4]
    assert (tmp_path / "metrics.csv").read_text() == "step,reward/mean\n1,0.125\n2,0.25\n3,0.375\n4,0.5\n"
    path = tmp_path / "metrics.jsonl"
    assert said[0] == f"{path}: left out 5 lines that cannot be read; the file as it was is {path}.damaged"
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged and len(said) == 2
    (tmp_path / "metrics.csv").write_text("no,header\n1,2\n")
    open_sinks(["csv"], str(tmp_path), 4, said.append)[0].close()
    assert (tmp_path / "metrics.csv.damaged-2").read_text() == "no,header\n1,2\n"


def test_rows_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        sinks = open_sinks(["jsonl", "csv", "tensorboard"], str(disk), None)
        for sink in sinks:
            sink.log(1, {"loss": 1.0})
        ballast = fill(disk)
        failed = [0, 0, 0]
        for step in range(2, 400):
            for i, sink in enumerate(sinks):
                try:
                    sink.log(step, {"loss": float(step), **({"late": 1.0} if step == 300 else {})})
                except OSError:
                    failed[i] += 1
        assert all(failed), failed
        for line in (disk / "metrics.jsonl").read_text().splitlines():
            json.loads(line)  # whole lines only, meanwhile
        ballast.unlink()
        for sink in sinks:
            sink.log(400, {"loss": 400.0})
            sink.close()
        assert [row["step"] for row in jsonl(disk)] == list(range(1, 401))
        with open(disk / "metrics.csv") as f:
            rows = list(csv.DictReader(f))
        assert [int(row["step"]) for row in rows] == list(range(1, 401)) and rows[299]["late"] == "1.0"
        events = EventAccumulator(str(disk / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        assert {e.step for e in events.Scalars("loss")} >= {1, 399, 400}


def test_an_earlier_run_is_moved_and_not_deleted(tmp_path: Path) -> None:
    assert set_aside_earlier_run(str(tmp_path / "nowhere")) is None
    for i in ("1", "2"):
        log_run(tmp_path, None, range(1, 3), ("jsonl", "csv", "tensorboard"))
        write_samples(str(tmp_path), 1, [])
        (tmp_path / "config.yaml").write_text(i)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        assert set_aside_earlier_run(str(tmp_path)) == str(tmp_path / "earlier" / i)
        assert sorted(os.listdir(tmp_path)) == ["checkpoints", "earlier"]
    names = ["config.yaml", "metrics.csv", "metrics.jsonl", "rollouts", "tensorboard"]
    assert sorted(os.listdir(tmp_path / "earlier" / "1")) == names
    assert (tmp_path / "earlier" / "2" / "config.yaml").read_text() == "2"


def report_of(run_dir: Path, first_step: int | None = None) -> Report:
    trainer = TrainerConfig(default_local_dir=str(run_dir), logger=["console", "jsonl"])
    inputs: Any = SimpleNamespace(config=Config(trainer=trainer))
    report = Report(inputs, rank=0, first_step=first_step)
    report.begin()
    return report


def test_a_report_goes_back_without_doubles(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    for step in (1, 2, 3):
        report.step(step, {"reward/mean": step / 8}, {})
    report.rewind(2)
    report.step(2, {"reward/mean": 1.0}, {})
    report.close()
    assert [(row["step"], row["reward/mean"]) for row in jsonl(tmp_path)] == [(1, 0.125), (2, 1.0)]


def test_a_run_says_where_its_metrics_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path)
    report.step(1, {"reward/mean": 0.5}, {})
    report.close()
    assert capsys.readouterr().out.splitlines()[-1] == f"metrics are in {tmp_path}; `megarl report` draws them"
    report = report_of(tmp_path / "again")
    report.close()
    assert capsys.readouterr() == ("", "")  # it ended before its first step, and something else says why


def test_samples_are_readable(tmp_path: Path) -> None:
    path = write_samples(str(tmp_path), 12, [Sample(prompt="1 + 1 =", response="zwölf", answer="2", reward=0.0)])
    assert path == str(tmp_path / "rollouts" / "step_000012.jsonl")
    text = Path(path).read_text(encoding="utf-8")
    assert text == '{"prompt": "1 + 1 =", "response": "zwölf", "answer": "2", "reward": 0.0}\n'


METRICS = {
    "reward/mean": 0.25,
    "val/accuracy": 0.5,
    "actor/loss": 3.0,
    "tokens_per_s": 12345.6,
    "timing/generate_s": 1.5,
    "timing/reward_s": 0.01,
}


def test_progress_without_a_terminal_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(12, "RL", done=2) as progress:
        progress.advance(METRICS)
        progress.note("checkpoint [global_step_3] written")
        progress.advance({"reward/mean": 0.5})
    first, note, second = capsys.readouterr().out.splitlines()
    fields = "reward 0.250  accuracy 50.0%  tokens/s 12,346 | generate 1.50s  reward 0.01s"
    assert re.fullmatch(rf"RL 3/12 \| {re.escape(fields)} \| eta \w+", first)
    assert note == "checkpoint [global_step_3] written"
    assert re.fullmatch(r"RL 4/12 \| reward 0\.500 \| eta \w+", second)


def read_until_closed(terminal: int, into: bytearray) -> None:
    with suppress(OSError):  # how Linux says that the other end is closed
        while data := os.read(terminal, 4096):
            into += data


def test_progress_on_a_terminal_keeps_the_last_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    output = bytearray()
    reader = threading.Thread(target=read_until_closed, args=(ours, output))  # the terminal's buffer is small
    reader.start()
    with os.fdopen(theirs, "w") as terminal, redirect_stdout(terminal), Progress(2, "RL") as progress:
        progress.advance(METRICS)
        progress.note("saved [a]")
        progress.advance({"reward/mean": 0.5})
    reader.join()
    os.close(ours)
    shown = output.decode()
    last = shown[shown.rindex("RL") :]
    assert "2/2" in last and "0.500" in last and "50.0%" in last and "eta" in last
    assert "saved [a]" in shown


def test_duration() -> None:
    assert [duration(s) for s in (0, 59, 61, 3661)] == ["0s", "59s", "1m01s", "1h01m"]

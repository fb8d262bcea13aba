"""What is recorded of each start of a run, and what reads it."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from report_runs import write_folder
from screens import needs_chromium
from test_report_page import Page, one, written
from tiny_run import ROOT, train_in, write_run

from megarl.cli.main import main
from megarl.cli.runs import read_run
from megarl.report.blocks import Blocks
from megarl.report.runs import runs_at
from megarl.trainer.run_lock import RunLock
from megarl.trainer.starts import Lasting, past_starts, record_start
from megarl.trainer.surroundings import Place, surroundings

GPU = {"ranks": 4, "on_gpus": True, "hosts": {"node7": "4 x NVIDIA H100"}, "user": "ada"}


def start(run: Path, began: float, **values: Any) -> None:
    record_start(str(run), "trainer: {}\n", {"began": began, **GPU, **values})


def test_each_start_is_kept(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of an earlier one, too, and no secret."""
    config = write_run(tmp_path, trainer__save_freq=1, trainer__logger=["jsonl"])
    train_in(ranks, 2, config, "trainer.total_training_steps=1")
    train_in(ranks, 2, config, "actor_rollout_ref.actor.optim.lr=0.5")
    first, second = past_starts(str(tmp_path / "run"))
    assert (first.number, first.ranks, first.checkpoint, second.number) == (1, 2, "", 2)
    assert second.checkpoint == str(tmp_path / "run" / "checkpoints" / "global_step_1") and not second.on_gpus
    assert list(first.hosts.values()) == ["2 x CPU"] and second.began > first.began and second.seconds > 0
    folders = [tmp_path / "run" / "starts" / number for number in ("0001", "0002")]
    configurations = [(folder / "config.yaml").read_text() for folder in folders]
    assert ["lr: 0.5" in text for text in configurations] == [False, True]
    assert configurations[1] == (tmp_path / "run" / "config.yaml").read_text()
    environment = json.loads((folders[1] / "environment.json").read_text())
    assert {"python", "torch", "megatron-core", "numpy"} <= environment["versions"].keys()
    assert environment["code"]["version"] and sum(f.stat().st_size for f in folders[0].iterdir()) < 2**15
    assert {oct(f.stat().st_mode & 0o777) for folder in folders for f in folder.iterdir()} == {"0o600"}


def test_surroundings_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["megarl", "train", "a.yaml", "reward.args.api_key=typed-secret", "--token=other-secret", "https://u:p@h/"]
    monkeypatch.setattr(sys, "orig_argv", words)
    for name, value in {"NCCL_DEBUG": "INFO", "VLLM_API_KEY": "third-secret", "HOME_SECRET": "no"}.items():
        monkeypatch.setenv(name, value)
    found = surroundings([Place("a", "H100"), Place("a", "H100"), Place("b", "H100")])
    assert not re.search("typed-secret|other-secret|third-secret|u:p", json.dumps(found))
    assert found["command"][:3] == words[:3] and found["variables"]["NCCL_DEBUG"] == "INFO"
    assert "HOME_SECRET" not in found["variables"]
    assert (found["hosts"], found["ranks"], found["on_gpus"]) == ({"a": "2 x H100", "b": "1 x H100"}, 3, True)


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own working copy, whether a file was changed; not of a project that it is only installed in."""
    import megarl
    from megarl.trainer.surroundings import code_version

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "megarl"
    package.mkdir()
    (package / "__init__.py").write_text("1\n")
    (tmp_path / "other").write_text("1\n")
    monkeypatch.setattr(megarl, "__file__", str(package / "__init__.py"))
    git("init", "-q")
    git("add", "other")
    git("commit", "-qm", "other")
    assert "changed" not in code_version()
    git("add", "megarl")
    git("commit", "-qm", "megarl")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert code_version() == {"version": megarl.__version__, "commit": commit, "changed": False}
    (package / "__init__.py").write_text("2\n")
    assert code_version() == {"version": megarl.__version__, "commit": commit, "changed": True}


def test_how_a_start_ended_and_its_hours(tmp_path: Path) -> None:
    """A note of the end is for the start that this process recorded; a killed one has its last beat."""
    run = tmp_path / "run"
    start(run, time.time() - 7200)
    Lasting(str(run)).beat()
    lock = RunLock(str(run), steps=9)
    lock.note_end("refused")  # before it recorded a start
    assert [past.ended for past in past_starts(str(run))] == [""]
    start(run, json.loads((run / "lock").read_text())["began"], hosts={"node7": "", "node8": ""})
    assert past_starts(str(run), running=True)[1].ended == ""
    lock.note_end("stopped by SIGTERM")
    lock.release()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert [past.ended for past in past_starts(str(run))] == ["", "stopped by SIGTERM"]
    found = read_run(str(run))
    assert (found.starts, found.hosts) == (2, ["node7", "node8"]) and 8.0 <= (found.gpu_hours or 0) < 8.1


@pytest.mark.slow
def test_a_killed_run_has_its_start(tmp_path: Path) -> None:
    config = write_run(tmp_path, trainer__total_training_steps=10**6, trainer__val_before_train=False)
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(config), "reward.args={}"]
    run = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert run.poll() is None
        time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    (past,) = past_starts(str(tmp_path / "run"))
    assert past.ended == "" and past.seconds > 0 and past.command.endswith(f"train {config} reward.args={{}}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_folders_of_others_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    shared = Path("/tmp") / f"runs-of-two-{os.getpid()}"
    shared.mkdir(mode=0o755)
    try:
        for name in ("mine", "hidden"):
            write_folder(shared / name, steps=1)
        (shared / "hidden").chmod(0o700)
        os.setegid(65534)
        os.seteuid(65534)
        try:
            assert main(["runs", str(shared), "--json"]) == 0
        finally:
            os.seteuid(0)
            os.setegid(0)
        out, err = capfd.readouterr()
        assert [json.loads(line)["folder"] for line in out.splitlines()] == [str(shared / "mine")]
        assert json.loads(out)["owner"] == "root" and err == f"megarl: you may not read {shared}/hidden (of root)\n"
    finally:
        shutil.rmtree(shared)


def test_hostile_records_are_left_out(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=1)
    start(run, 1.8e9)
    files = ("environment.json", "end.json")
    for text in ("[" * 10**5, '{"began": 1e999, "ranks": "x", "hosts": [], "command": 3, "code": 1}', "null", "\xff"):
        for name in files:
            (run / "starts" / "0001" / name).write_text(text)
        found = read_run(str(run))
        assert (found.starts, found.hosts, found.gpu_hours) == (1, [], None)
        assert starts_of(run)["rows"][0][:5] == [1, 0.0, 0.0, "without a word", ""]
    for name in files:
        (run / "starts" / "0001" / name).unlink()
        os.mkfifo(run / "starts" / "0001" / name)
    assert read_run(str(run)).starts == 1


def starts_of(run: Path) -> Any:
    return json.loads(gzip.decompress(Blocks(runs_at([str(run)])).refresh()["starts-0"].data))


def test_the_report_has_a_table_of_starts(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=1)
    assert starts_of(run) == {"total": 0, "gpu_hours": 0, "parent": "", "rows": []}
    for number in range(120):
        start(run, 1.8e9 + number)
    found = starts_of(run)
    assert found["total"] == 120 and [row[0] for row in found["rows"]] == list(range(21, 121))
    blocks = Blocks(runs_at([str(run)]))
    before = blocks.refresh()["starts-0"]
    (run / "starts" / "0120" / "end.json").write_text('{"seconds": 3600, "ended": "finished"}')
    after = blocks.refresh()["starts-0"]
    assert before.version != after.version
    row = json.loads(gzip.decompress(after.data))["rows"][-1]
    assert row[2:7] == [3600.0, "finished", "ada", "node7 (4 x NVIDIA H100)", 4]


@needs_chromium
def test_starts_beside_the_configuration(browser: Any, tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=1)
    start(run, 1.8e9, code={"version": "0.1.0", "commit": "1a2b3c4d5e6f7", "changed": True}, user="<b>ada</b>")
    (run / "starts" / "0001" / "end.json").write_text('{"seconds": 5400, "ended": "finished"}')
    (run / "parent.json").write_text('{"checkpoint": "/runs/a/checkpoints/global_step_800"}')
    page = Page(browser, written(tmp_path, run), "configuration")
    text = page.js(f"{one('[data-starts=run]')}.innerText")
    assert "run: 1 start, 6.0 GPU-hours, branched from /runs/a/checkpoints/global_step_800" in text
    assert "1.50 h\tfinished\t<b>ada</b>\tnode7 (4 x NVIDIA H100)\t4\t0.1.0, 1a2b3c4d5e6f, changed" in text
    assert page.errors() == []

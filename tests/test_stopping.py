"""A whole run that is stopped by a signal, goes on, refuses company, loses its launcher and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from tiny_run import ROOT, metrics_of, write_run

from megarl.checkpoint.folder import whole_checkpoints
from megarl.cli.main import main
from megarl.trainer.run_lock import check_free

REWARD = "import time\ndef score(response, row):\n    time.sleep(0.01)\n    return 0.5\n"


def processes_of(folder: Path) -> dict[int, str]:
    """Every process that has the run's folder in its command line or its environment."""
    found = {}
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in words and int(proc.name) != os.getpid():
            found[int(proc.name)] = words.split(b"MEGARL_TEST")[0].replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_until_gone(folder: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while left := processes_of(folder):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def start(config: Path, until: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A run that has printed a line with `until`, and its lines so far."""
    run = subprocess.Popen(
        [sys.executable, "-m", "megarl.cli.main", "train", str(config)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MEGARL_TEST": str(config.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if until in line:
            return run, lines
    raise AssertionError("".join(lines))


def ranks_of(run: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found.update({int(word[5:]): int(pid) for word in environment if word.startswith(b"RANK=")})
    return found


@pytest.mark.slow
def test_a_run_stops_goes_on_and_loses_its_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = write_run(
        tmp_path,
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=10_000,
        trainer__save_freq=-1,
        trainer__val_before_train=False,
        reward__name=f"{tmp_path / 'reward.py'}:score",
    )
    run, _ = start(config, "RL 2/")
    os.kill(ranks_of(run)[1], signal.SIGUSR1)  # one rank alone, and not the one that speaks: all agree to stop
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 128 + signal.SIGUSR1
    wait_until_gone(tmp_path)
    step = metrics_of(tmp_path)[-1]["step"]
    checkpoint = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
    assert out.splitlines()[-1] == (
        f"megarl: stopped by SIGUSR1 after step {step}; checkpoint {checkpoint}; the same command goes on from it"
    )
    assert "Traceback" not in out and checkpoint.is_dir()

    run, lines = start(config, f"RL {step + 2}/")
    assert f"resuming from {checkpoint}\n" in lines
    ranks = ranks_of(run)
    assert main(["train", str(config)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"megarl: error: {tmp_path / 'run'} is in use by pid {ranks[0]} on host ")
    assert refused.count("\n") == 1
    assert run.poll() is None
    run.kill()
    run.wait()
    wait_until_gone(tmp_path)
    check_free(str(tmp_path / "run"))
    assert [row["step"] for row in metrics_of(tmp_path)][: step + 2] == list(range(1, step + 3))


@pytest.mark.slow
def test_a_run_that_is_stopped_on_a_full_disk_says_what_it_goes_on_from(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = write_run(
        tmp_path,
        trainer__total_training_steps=10_000,
        trainer__save_freq=1,
        trainer__val_before_train=False,
        trainer__logger=["console", "jsonl"],
        reward__name=f"{tmp_path / 'reward.py'}:score",
    )
    with small_disk(tmp_path / "run", 2**16) as disk:
        run, _ = start(config, "RL 2/")
        fill(disk)
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=200)
        whole = whole_checkpoints(str(disk))
    assert run.returncode == 128 + signal.SIGTERM and "Traceback" not in out, out
    said = re.fullmatch(
        rf"megarl: stopped by SIGTERM after step (\d+), and not saved: global_step_(\d+) could not be saved in "
        rf"'{disk}/checkpoints': \[Errno 28\] No space left on device.*; make room, and the same command goes on from "
        rf"{re.escape(whole[0])}",
        out.splitlines()[-1],
    )
    assert said is not None and said[1] == said[2], out

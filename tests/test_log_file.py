"""What ranks print is kept in RUN/logs, whatever ends them."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import ROOT, write_run

from megarl.telemetry.log_file import LogFile

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "

RANK = """
import logging, os, signal, sys
from megarl.plain import plain_output
from megarl.telemetry.console import go_on_without
from megarl.telemetry.log_file import LOG, keep_log
go_on_without()
print("before the folder is there")
keep_log(sys.argv[1], 3, "info")
logging.getLogger("library").info("low"); logging.getLogger("library").warning("high")
if os.fork() == 0:
    print("of a forked helper", flush=True)
    os._exit(0)
os.wait()
from rich.table import Table
from megarl.telemetry.progress import Progress, print_table
table = Table("head"); table.add_row("cell"); print_table(table)
with Progress(2, "RL") as progress:
    progress.advance({"reward/mean": 0.5})
    progress.note("a note")
try:
    {}["missing"]
except KeyError:
    import traceback; traceback.print_exc()
print("half a line", end="")
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def text_of(folder: Path, name: str) -> str:
    return re.sub(f"^{STAMP}", "", (folder / "logs" / name).read_text(), flags=re.MULTILINE)


def test_lines_have_times_and_the_file_is_bounded(tmp_path: Path) -> None:
    log = LogFile()
    log.write("waits ")
    log.write("for the file\n\nnext")
    log.write("x" * 10**6)  # more than waits
    log.open(str(tmp_path), "rank_0")
    lines = (tmp_path / "logs" / "rank_0.log").read_text().split("\n")
    assert re.fullmatch(f"{STAMP}--- rank_0 on .*, pid {os.getpid()}", lines[0])
    assert re.fullmatch(f"{STAMP}waits for the file", lines[1]) and lines[2] == "" and len(lines[3]) <= 2**16
    assert (tmp_path / "logs" / "rank_0.log").stat().st_mode & 0o777 == 0o600
    log.open(str(tmp_path), "rank_0", most=2000)
    log.write("x" * 10**4)
    for number in range(200):
        log.write(f"line {number} \udcff\n")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert sizes.keys() == {"rank_0.log", "rank_0.log.1"} and max(sizes.values()) <= 2000
    kept = re.findall(r"line (\d+)", text_of(tmp_path, "rank_0.log.1") + text_of(tmp_path, "rank_0.log"))
    assert kept == [str(number) for number in range(200 - len(kept), 200)] and len(kept) > 40
    log.close()


def test_a_launcher_makes_no_folder(tmp_path: Path) -> None:
    log = LogFile()
    log.open_if_there(str(tmp_path), "node_1")
    log.write("first\n")
    assert not list(tmp_path.iterdir())
    (tmp_path / "logs").mkdir()
    log.write("second\n")
    assert re.fullmatch(r"--- node_1 on .*\nfirst\nsecond\n", text_of(tmp_path, "node_1.log"))
    log.close()


def test_a_link_or_a_pipe_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "other").write_text("as it was")
    os.symlink(tmp_path / "other", tmp_path / "logs" / "rank_0.log")
    os.mkfifo(tmp_path / "logs" / "rank_1.log")
    for name in ("rank_0", "rank_1"):
        log = LogFile()
        log.open(str(tmp_path), name)
        log.write("text")
        log.close()
    assert (tmp_path / "other").read_text() == "as it was"


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_nothing_is_lost_with_a_rank_that_is_killed(tmp_path: Path, number: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path), number],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == -getattr(signal, number), done.stderr
    text = text_of(tmp_path, "rank_3.log")
    lines = text.splitlines()
    assert lines[1:4] == ["before the folder is there", "library INFO low", "high"]
    assert "│ cell │\n" in text and lines.count("a note") == 1 and any(line.startswith("RL 1/2 | ") for line in lines)
    assert "KeyError: 'missing'\nhalf a line" in text and "forked" not in text
    assert ("Fatal Python error: Segmentation fault" in text) == (number == "SIGSEGV")
    assert "Fatal Python error" not in done.stderr and "library INFO" not in done.stderr and "high" in done.stderr


def test_a_level_keeps_what_the_console_does_not_show() -> None:
    """In a process of its own: logging is the process's."""
    code = "from megarl.telemetry.log_file import keep_records; import logging; keep_records('warning'); "
    code += "print(logging.getLogger().handlers, logging.getLogger().level)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    assert out == f"[] {logging.WARNING}\n"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["megarl", "torchrun"])
def test_a_run_that_fails_leaves_its_traceback(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "flow.py").write_text(
        "import os\nfrom megarl.flows.ppo import flow as ppo\n"
        "def flow(run):\n    if run.world.rank == 1:\n        os.environ['of_rank_1']\n    ppo(run)\n"
    )
    (tmp_path / "reward.py").write_text("def score(response, row):\n    return 0.5\n")
    config = write_run(tmp_path, trainer__n_gpus_per_node=2, reward__name=f"{tmp_path}/reward.py:score")
    words = {"megarl": ["megarl.cli.main", "train"], "torchrun": ["torch.distributed.run", "--nproc_per_node=2"]}
    command = [sys.executable, "-m", *words[launcher], *(["-m", "megarl.train"] if launcher == "torchrun" else [])]
    done = subprocess.run(
        [*command, str(config), f"trainer.flow={tmp_path}/flow.py:flow"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 1
    assert "KeyError: 'of_rank_1'" in done.stderr and "KeyError: 'of_rank_1'" in text_of(tmp_path / "run", "rank_1.log")

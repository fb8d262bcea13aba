"""The launcher: exit codes, signals, and that nothing of a job is left, with ranks that need no torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megarl.launcher import Node, launch

HOST = socket.gethostname()


def job(code: str, folder: Path, node: Node | None = None) -> int:
    """Run Python code as two ranks; `note(text)` in it leaves a file. No process of the job may be left."""
    before = set(psutil.Process().children(recursive=True))
    prelude = (
        "import os, signal, subprocess, sys, time\n"
        "rank = os.environ['RANK']\n"
        f"def note(text): open(os.path.join({str(folder)!r}, rank + text), 'w').close()\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])\n"
    )
    code_of_job = launch([sys.executable, "-c", prelude + code], node or Node(nproc=2), timeout_minutes=1)
    assert not [p for p in psutil.Process().children(recursive=True) if p not in before]
    return code_of_job


def test_a_job_that_ends_well_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    code = f"note('-'.join(os.environ[name] for name in {names})); assert os.getsid(0) == os.getpid()"
    assert job(code, tmp_path) == 0
    assert sorted(os.listdir(tmp_path)) == ["00-2-2-127.0.0.1", "11-2-2-127.0.0.1"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("code", [1, 2])
def test_the_failing_rank_s_exit_code_is_the_job_s(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    """It has said why; the other one, which it would hang, is ended with its helpers."""
    helper = "subprocess.Popen(['sleep', '100'], start_new_session=True)"
    started = time.monotonic()
    waits = f"while not os.path.exists({str(tmp_path / '0helper')!r}): time.sleep(0.01)"
    source = f"if rank == '0':\n {helper}; note('helper'); time.sleep(100)\n{waits}\nsys.exit({code})"
    assert job(source, tmp_path) == code
    assert time.monotonic() - started < 30
    assert capfd.readouterr() == ("", "")


def test_a_death_without_words_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "note(str(os.getpid())); time.sleep(100 * (rank == '0')); os.kill(os.getpid(), signal.SIGKILL)"
    assert job(source, tmp_path) == 128 + signal.SIGKILL
    (pid,) = [name[1:] for name in os.listdir(tmp_path) if name[0] == "1"]
    assert capfd.readouterr().err == f"megarl: rank 1 (pid {pid} on {HOST}) was killed by SIGKILL\n"
    assert job("time.sleep(100 * (rank == '0')); os._exit(7)", tmp_path) == 7
    assert capfd.readouterr().err.endswith(f" on {HOST}) ended with exit code 7\n")


def _when_there(files: list[Path], *numbers: int) -> threading.Thread:
    """Sends this process the signals, one after the other, as soon as the files are there."""

    def send() -> None:
        while not all(file.exists() for file in files):
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


NOTES_SIGNALS = """
got = []
def handler(number, frame):
    got.append(number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handler)
note('ready')
while len(got) < {until}:
    time.sleep(0.05)
time.sleep(1 + int(rank))
note('-'.join(map(str, got)))
sys.exit(128 + got[0])
"""


def test_a_signal_reaches_every_rank_once_and_all_may_finish(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    thread = _when_there([tmp_path / "0ready", tmp_path / "1ready"], signal.SIGUSR1)
    assert job(NOTES_SIGNALS.format(until=1), tmp_path) == 128 + signal.SIGUSR1
    thread.join()
    assert {"010", "110"} < set(os.listdir(tmp_path))  # SIGUSR1 is 10; rank 1 ended a second later than rank 0
    assert capfd.readouterr() == ("", "")


def test_a_second_signal_ends_ranks_that_do_not_listen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.launcher.FORCED_GRACE", 1.0)
    thread = _when_there([tmp_path / "0ready", tmp_path / "1ready"], signal.SIGTERM, signal.SIGTERM)
    assert job(NOTES_SIGNALS.format(until=100), tmp_path) == 128 + signal.SIGTERM
    thread.join()
    assert sorted(os.listdir(tmp_path)) == ["0ready", "1ready"]
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_is_stopped_alone_is_named_when_the_others_stay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.launcher.STOP_GRACE", 1.0)
    assert job("time.sleep(100 * (rank == '0')); sys.exit(143)", tmp_path) == 143
    err = capfd.readouterr().err
    assert err.startswith("megarl: rank 1 (pid ") and err.endswith(f" on {HOST}) was ended by SIGTERM\n")


def test_a_taken_port_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        node = Node(nproc=1, nnodes=2, master_port=taken.getsockname()[1])
        with pytest.raises(ValueError, match=f"^port {node.master_port} of this host is in use; give another --mas"):
            launch(["true"], node, timeout_minutes=1)


def test_a_node_without_a_first_node_is_refused_in_one_line() -> None:
    node = Node(nproc=1, nnodes=2, node_rank=1, master_port=1)
    with pytest.raises(ValueError, match=r"^no launcher of node 0 answers at 127.0.0.1:1; start it there, or check"):
        launch(["true"], node, timeout_minutes=0.01)


def test_a_node_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second node's launcher is a process of its own; its ranks would sleep on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sleeps = "import os, time; open(os.environ['NOTE'], 'w').close(); time.sleep(100)"
    launcher = (
        "import sys; from megarl.launcher import Node, launch\n"
        f"node = Node(nproc=1, nnodes=2, node_rank=1, master_port={port})\n"
        f"sys.exit(launch([sys.executable, '-c', {sleeps!r}], node, timeout_minutes=1))"
    )
    environment = {**os.environ, "NOTE": str(tmp_path / "there")}
    other = psutil.Popen([sys.executable, "-c", launcher], env=environment)
    source = f"while not os.path.exists({str(tmp_path / 'there')!r}): time.sleep(0.05)\nsys.exit(3)"
    first = Node(nproc=1, nnodes=2, master_port=port)
    before = set(psutil.Process().children())
    assert other in before
    assert job(source, tmp_path, first) == 3
    assert other.wait(timeout=30) == 3
    assert capfd.readouterr().err.count("\n") == 1

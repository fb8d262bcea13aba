"""The launcher: exit codes, signals, and that nothing of a job is left, with ranks that need no torch."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import free_port
from selection import quick

from megarl.endings import ExitCode
from megarl.launcher import _folder, launch
from megarl.nodes import Node

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
    helper = "subprocess.Popen(['sleep', '9999'], start_new_session=True)"
    waits = f"while not os.path.exists({str(tmp_path / '0helper')!r}): time.sleep(0.01)"
    source = f"if rank == '0':\n {helper}; note('helper'); time.sleep(9999)\n{waits}\nsys.exit({code})"
    assert job(source, tmp_path) == code
    assert capfd.readouterr() == ("", "")


def test_a_death_without_words_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hold = "held = b'x' * 2**29 * int(rank)"
    source = f"note(str(os.getpid())); time.sleep(9999 * (rank == '0')); {hold}; os.kill(os.getpid(), signal.SIGKILL)"
    assert job(source, tmp_path) == 128 + signal.SIGKILL
    (pid,) = [name[1:] for name in os.listdir(tmp_path) if name[0] == "1"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"megarl: rank 1 (pid {pid} on {HOST}) was killed by SIGKILL")
    said = re.search(
        r"; if nobody sent it, memory ran out: the rank held up to (.+) GiB of this machine's .+ GiB$", line
    )
    assert said and float(said[1]) >= 0.5
    assert job("time.sleep(9999 * (rank == '0')); os._exit(7)", tmp_path) == 7
    assert capfd.readouterr().err.endswith(f" on {HOST}) ended with exit code 7\n")
    cut_short = (
        f"time.sleep(9999 * (rank == '0'))\nimport mmap\nf = open({str(tmp_path / 'rows')!r}, 'w+b')\n"
        "f.truncate(8192)\nrows = mmap.mmap(f.fileno(), 8192)\nf.truncate(0)\nrows[0]"
    )
    assert job(cut_short, tmp_path) == 128 + signal.SIGBUS
    assert "was killed by SIGBUS; a file that it maps, such as a cached one" in capfd.readouterr().err


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
    assert job("time.sleep(9999 * (rank == '0')); sys.exit(143)", tmp_path) == 143
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


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", ""])
def test_a_first_node_without_an_address_is_refused_in_one_line(name: str, node_rank: int) -> None:
    """Before any rank starts: torch would ask for it, and warn, for ever."""
    node = Node(nproc=1, nnodes=2, node_rank=node_rank, master_addr=name, master_port=free_port())
    with pytest.raises(
        ValueError, match=rf"^{HOST} finds no address of node 0's host '{name}' \(.*\); give another --m"
    ):
        launch(["true"], node, timeout_minutes=1)


def test_a_node_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second node's launcher is a process of its own; its ranks would sleep on."""
    port = free_port()
    sleeps = "import os, time; open(os.environ['NOTE'], 'w').close(); time.sleep(9999)"
    launcher = (
        "import sys; from megarl.launcher import _folder, Node, launch\n"
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
    assert other.wait(timeout=500) == 3
    lines = capfd.readouterr().err.splitlines()
    # a busy machine starts the second launcher late, and the first says that it waits
    assert len([line for line in lines if not line.startswith("megarl: waiting for ")]) == 1, lines


def launcher_of(node: Node, code: str, *, minutes: float = 1.0) -> subprocess.Popen[str]:
    """A node's launcher in a process of its own."""
    source = (
        "import sys; from megarl.launcher import _folder, launch; from megarl.nodes import Node\n"
        f"try: sys.exit(launch([sys.executable, '-c', {code!r}], {node!r}, timeout_minutes={minutes}))\n"
        "except ValueError as e: print('refused:', e, file=sys.stderr); sys.exit(2)"
    )
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as the command sets it
    return subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True, env=quiet)


def two_nodes(first: Node, second: Node, code: str = "") -> list[tuple[int, str]]:
    """Exit code and what each said, of two launchers that meet on this host."""
    launchers = [launcher_of(node, code) for node in (first, second)]
    return [end_of(launcher) for launcher in launchers]


def end_of(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it said, but for what a busy machine may make it say."""
    lines = launcher.communicate(timeout=500)[1].splitlines(keepends=True)
    return launcher.returncode, "".join(line for line in lines if not line.startswith("megarl: waiting for "))


def test_the_store_of_one_node_is_a_file_that_no_other_user_can_open(tmp_path: Path) -> None:
    """The launcher has no socket, and the file is gone with the job."""
    before = [connection.laddr for connection in psutil.Process().net_connections("inet")]  # of other tests
    source = (
        "import stat, psutil\nfile = os.environ['MEGARL_STORE']; folder = os.path.dirname(file)\n"
        "assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700 and os.stat(folder).st_uid == os.getuid()\n"
        "sockets = psutil.Process(os.getppid()).net_connections('inet')\n"
        f"assert not {{tuple(socket.laddr) for socket in sockets}} - {{*{[tuple(where) for where in before]}}}\n"
        f"open(os.path.join({str(tmp_path)!r}, 'told' + rank), 'w').write(folder)"
    )
    assert job(source, tmp_path) == 0
    folders = {(tmp_path / name).read_text() for name in ("told0", "told1")}
    assert len(folders) == 1 and not os.path.exists(folders.pop())


def test_what_a_killed_launcher_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of one that runs."""
    monkeypatch.setattr("os.access", lambda *_: False)  # instead of the folder that all launchers use
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "megarl-job-left").mkdir()
    (tmp_path / "megarl-job-left" / "store").touch()
    os.utime(tmp_path / "megarl-job-left", (0, 0))
    (tmp_path / "megarl-job-runs").mkdir()
    runs = os.open(tmp_path / "megarl-job-runs", os.O_RDONLY)
    fcntl.flock(runs, fcntl.LOCK_EX)
    with _folder() as own, _folder() as other:
        assert sorted(os.listdir(tmp_path)) == sorted(["megarl-job-runs", Path(own).name, Path(other).name])
    os.close(runs)
    assert os.listdir(tmp_path) == ["megarl-job-runs"]


@pytest.mark.slow
def test_the_store_of_several_nodes_listens_where_they_look_for_it(tmp_path: Path) -> None:
    port = free_port()
    code = (
        "import os, psutil\nlaunchers = psutil.Process(os.getppid())\n"
        "there = [c.laddr for c in launchers.net_connections('inet') if c.status == 'LISTEN']\n"
        f"assert [tuple(a) for a in there] == ([('127.0.0.1', {port})] if os.environ['RANK'] == '0' else []), there\n"
        "assert os.environ['GLOO_SOCKET_IFNAME'] == os.environ['NCCL_SOCKET_IFNAME'] == 'lo'"
    )
    place = {"nproc": 1, "nnodes": 2, "master_port": port}
    assert two_nodes(Node(**place), Node(**place, node_rank=1), code) == [(0, ""), (0, "")]


DIFFERENT = [
    ({"nproc": 2}, "node 0 on HOST was started with --nproc 1, node 1 on HOST with 2; give all the same"),
    ({"nnodes": 3}, "node 0 on HOST was started with --nnodes 2, node 1 on HOST with 3; give all the same"),
    (
        {"same": {"configuration": "b"}},
        "node 0 on HOST and node 1 on HOST differ in their configuration; start every node with the same file and the "
        "same key=value arguments",
    ),
]


@pytest.mark.parametrize(("change", "said"), quick(DIFFERENT, 2), ids=["nproc", "nnodes", "configuration"])
def test_nodes_that_were_started_with_different_things(change: dict[str, Any], said: str) -> None:
    """Each says so in one line, before any rank starts."""
    first = Node(nproc=1, nnodes=2, master_port=free_port(), same={"configuration": "a"})
    line = f"refused: {said.replace('HOST', HOST)}\n"
    assert two_nodes(first, replace(first, node_rank=1, **change), "raise SystemExit(9)") == [(2, line), (2, line)]


@pytest.mark.slow
def test_two_launchers_of_the_same_node() -> None:
    first = Node(nproc=1, nnodes=3, master_port=free_port())
    waiting = launcher_of(first, "", minutes=0.2)
    second, third = two_nodes(replace(first, node_rank=1), replace(first, node_rank=1))
    assert {second[0], third[0]} == {2}
    line = "refused: another launcher is node 1 of this job; give each its own --node-rank\n"
    assert [second[1], third[1]].count(line) == 1
    _, said = waiting.communicate(timeout=500)
    assert "refused: node 2 of 3 did not come within 0.2 minutes (trainer.timeout_minutes)" in said


@pytest.mark.slow
def test_why_a_job_is_refused_reaches_every_node() -> None:
    """Also one that neither found the difference nor keeps the store."""
    first = Node(nproc=1, nnodes=3, master_port=free_port(), same={"configuration": "a"})
    nodes = [first, replace(first, node_rank=1, same={"configuration": "b"}), replace(first, node_rank=2)]
    ends = [end_of(launcher) for launcher in [launcher_of(node, "") for node in nodes]]
    assert {code for code, _ in ends} == {2} and len({text for _, text in ends}) == 1, ends
    assert "differ in their configuration" in ends[0][1]


def test_a_node_that_does_not_come_is_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.nodes.FIRST_WORD", 0.2)
    node = Node(nproc=1, nnodes=3, master_port=free_port())
    with pytest.raises(ValueError, match=r"^nodes 1, 2 of 3 did not come within 0.02 minutes \(trainer.timeout_min"):
        launch(["true"], node, timeout_minutes=0.02)
    assert capfd.readouterr().err == "megarl: waiting for nodes 1, 2 of 3\n"


def test_a_node_that_dies_is_named(tmp_path: Path) -> None:
    """Its launcher is killed, and its rank with it; the other node's rank has failed, as one that lost a peer does."""
    port, there = free_port(), tmp_path / "there"
    code = (
        "import os, sys, time\nfrom megarl.processes import die_with_parent\ndie_with_parent()\n"
        f"if os.environ['RANK'] == '1': open({str(there)!r}, 'w').close(); time.sleep(100)\n"
        f"while not os.path.exists({str(tmp_path / 'killed')!r}): time.sleep(0.05)\n"
        "sys.exit(1)"
    )
    first = Node(nproc=1, nnodes=2, master_port=port)
    launchers = [launcher_of(node, code) for node in (first, replace(first, node_rank=1))]
    while not there.exists():
        time.sleep(0.05)
    launchers[1].kill()
    launchers[1].communicate()
    (tmp_path / "killed").touch()
    assert end_of(launchers[0]) == (1, f"megarl: node 1 of 2 (on {HOST}) is gone: its launcher gives no sign of life\n")


@pytest.mark.slow
def test_the_first_node_dies(tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom megarl.processes import die_with_parent\ndie_with_parent()\n"
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').close()\ntime.sleep(100)"
    )
    first = Node(nproc=1, nnodes=2, master_port=free_port())
    launchers = [launcher_of(node, code) for node in (first, replace(first, node_rank=1))]
    while len(os.listdir(tmp_path)) < 2:
        time.sleep(0.05)
    launchers[0].kill()
    launchers[0].communicate()
    gone = f"megarl: node 0 of 2 (on {HOST}) is gone: the launcher of node 0 no longer answers\n"
    assert end_of(launchers[1]) == (ExitCode.LOST, gone)

"""What another user of the same machine can read and change of a run: its sockets and files, tried as that user."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from other_user import python_of, with_path
from ranks import free_port
from test_endpoint import agent_run
from tiny_run import FOUR_RANKS, ROOT

NOBODY, FAMILIES = 65534, (socket.AF_INET, socket.AF_INET6)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]

AS_NOBODY = """
import os, socket, sys, json
from concurrent.futures import ThreadPoolExecutor
os.setgroups([]); os.setgid(NOBODY); os.setuid(NOBODY)
asked = json.load(sys.stdin)
found = {"open": [], "connected": [], "read": [], "answers": {}}
for path in asked["files"]:
    for flags, how in ((os.O_RDONLY, "read"), (os.O_WRONLY, "written")):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            found["open"].append([path, how])
        except OSError:
            pass
for path in asked["unix"]:
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
            found["connected"].append(path)
        except OSError:
            pass
def knock(where):
    host, port = where
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.settimeout(5)
        try:
            s.connect((host, port))
        except OSError:
            return
        found["connected"].append([host, port])
        text = b""
        try:
            s.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n")
            while part := s.recv(65536):
                text += part
        except OSError:
            pass
        found["answers"][f"{host}:{port}"] = text.decode("latin-1")[:2000]
with ThreadPoolExecutor(128) as pool:
    list(pool.map(knock, [(host, port) for host in asked["hosts"] for port in asked["ports"]]))
for pid in asked["pids"]:
    for name in ("environ", "mem", "maps", "fd/1"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
            found["read"].append([pid, name])
        except OSError:
            pass
json.dump(found, sys.stdout)
"""


@dataclass(frozen=True)
class Running:
    """A run on four ranks with an agent and a Prometheus sink, and a page that follows it."""

    folder: Path
    processes: list[psutil.Process]
    prometheus: int
    report: int
    since: float


@contextmanager
def running(folder: Path) -> Iterator[Running]:
    since, prometheus = time.time(), free_port()
    sections: dict[str, Any] = {
        **FOUR_RANKS,
        "trainer__logger": ["jsonl", "csv", "tensorboard", "prometheus"],
        "trainer__total_training_steps": 100000,
        "trainer__save_freq": 1,
        "trainer__max_ckpt_to_keep": 1,
        "trainer__val_before_train": False,
        "telemetry__prometheus__port": prometheus,
    }
    config = agent_run(folder, "two_turns", **sections)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "megarl.cli.main"]
    log = open(folder / "log", "w")  # noqa: SIM115
    run = subprocess.Popen([*words, "train", str(config)], cwd=ROOT, env=environment, stdout=log, stderr=log)
    pages = []
    try:
        metrics = folder / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert run.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        serve = [*words, "report", str(folder / "run"), "--serve", "0"]
        pages.append(subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        assert pages[0].stdout is not None
        port = int(re.findall(r":(\d+)/", pages[0].stdout.readline())[0])
        started = [psutil.Process(process.pid) for process in (run, *pages)]
        everyone = [one for process in started for one in (process, *process.children(recursive=True))]
        yield Running(folder, everyone, prometheus, port, since)
    finally:
        for process in (run, *pages):
            process.kill()
            process.wait()
        log.close()


def listening(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """(address, port) -> the command of the process that listens there."""
    found = {}
    for process in processes:
        for connection in process.net_connections("inet"):
            if connection.status == "LISTEN":
                found[connection.laddr.ip, connection.laddr.port] = " ".join(process.cmdline())
    return found


def files_of(run: Running) -> list[str]:
    """In the run's folder, and what the processes have open or have made since in shared places."""
    found = {str(path) for path in (run.folder / "run").rglob("*")} | {str(run.folder / "run")}
    for process in run.processes:
        found |= {file.path for file in process.open_files() if file.path.startswith(("/dev/shm", "/tmp", "/run"))}
    for place in ("/dev/shm", "/tmp"):
        for entry in os.scandir(place):
            of_torch = entry.name.startswith(("megarl", "torch", "nccl", "sem.", "psm_"))
            if of_torch and entry.stat(follow_symlinks=False).st_mtime >= run.since:
                found |= {entry.path, *(str(path) for path in Path(entry.path).rglob("*"))}
    given = {str(path) for path in run.folder.iterdir() if path.name != "run"}  # rows and model: the user's to hide
    return sorted(found - given)


def test_another_user_can_neither_read_nor_change_a_run(tmp_path: Path) -> None:
    shared = Path("/tmp") / f"other-users-{os.getpid()}"  # a place that every user can enter; pytest's is not
    shared.mkdir(mode=0o755)
    try:
        with running(shared) as run:
            ports = listening(run.processes)
            addresses = {address for address, _ in ports}
            files, pids = files_of(run), [process.pid for process in run.processes]
            parts = [part for parts in psutil.net_if_addrs().values() for part in parts]
            hosts = sorted({part.address for part in parts if part.family in FAMILIES and "%" not in part.address})
            unix = [c.laddr for process in run.processes for c in process.net_connections("unix") if c.laddr]
            asked = {"files": files, "unix": unix, "hosts": hosts, "ports": [port for _, port in ports], "pids": pids}
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY.replace("NOBODY", str(NOBODY))],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, done.stderr
            alive = [process for process in run.processes[:5] if process.is_running()]
            rows = len((shared / "run" / "metrics.jsonl").read_text().splitlines())
            until = time.monotonic() + 300
            while len((shared / "run" / "metrics.jsonl").read_text().splitlines()) <= rows + 1:
                assert time.monotonic() < until and all(process.is_running() for process in alive)
                time.sleep(0.2)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    found = json.loads(done.stdout)
    assert len(files) > 10 and len(pids) >= 6 and ports
    assert addresses <= {"127.0.0.1", "::1"}, ports
    assert not [where for where in found["connected"] if where[0] not in ("127.0.0.1", "::1")]
    assert (found["open"], found["read"]) == ([], [])
    answers = {int(where.rpartition(":")[2]): text for where, text in found["answers"].items() if text}
    metrics = answers.pop(run.prometheus)  # the one thing that is there for everybody: numbers, and no text
    assert metrics.startswith("HTTP/1.") and " 200 " in metrics
    assert answers.pop(run.report).split()[1] in ("403", "404")
    for port, text in answers.items():  # the agents' endpoint; gloo says nothing
        assert text.split()[1] == "404" and "megarl" not in text, (port, text)


def test_two_users_train_side_by_side() -> None:
    """The same configuration with an agent on two ranks, at once, on one machine."""
    pythons = {"root": [sys.executable], "nobody": python_of(NOBODY)}
    shared = Path("/tmp") / f"two-users-{os.getpid()}"
    shared.mkdir(mode=0o755)
    runs = {}
    try:
        for user, python in pythons.items():
            folder = shared / user
            folder.mkdir()
            config = agent_run(folder, "two_turns", trainer__n_gpus_per_node=2, trainer__total_training_steps=3)
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, user)
            environment = {**with_path(), "HOME": str(folder), "LOGNAME": user, "OMP_NUM_THREADS": "1"}
            command = [*python, "-m", "megarl.cli.main", "train", str(config)]
            with open(folder / "log", "w") as log:
                runs[user] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        codes = {user: run.wait(500) for user, run in runs.items()}
        assert codes == {"root": 0, "nobody": 0}, [(shared / user / "log").read_text() for user in codes]
        rows = {user: len((shared / user / "run" / "metrics.jsonl").read_text().splitlines()) for user in runs}
        assert rows == {"root": 4, "nobody": 4}  # with the validation before the steps
        owners = {user: {path.owner() for path in (shared / user / "run").rglob("*")} for user in runs}
        assert owners == {"root": {"root"}, "nobody": {"nobody"}}
    finally:
        for run in runs.values():
            run.kill()
        shutil.rmtree(shared, ignore_errors=True)

"""A real Slurm on this host: a controller, munge and three nodes, all of them processes of this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from ranks import free_port
from test_stopping import processes_of, wait_until_gone
from tiny_run import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("n0", "n1", "n2")
ANSWER_SECONDS = 400.0
GOING_ON = ("PENDING", "RUNNING", "COMPLETING", "SIGNALING")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
FirstJobId={first_job}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "needs root: munged and slurmd are started"


class Cluster:
    """A Slurm that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "NCCL"))}
        self._environment = {**ours, "SLURM_CONF": str(folder / "slurm.conf"), "MEGARL_PYTHON": sys.executable}

    def call(self, *command: str, **environment: str) -> str:
        """What a program of Slurm's prints."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str, **environment: str) -> Job:
        """Submit from the repository's root: `sbatch WORDS`."""
        output = (
            self.folder / "out-%A_%a" if any(word.startswith("--array") for word in words) else self.folder / "out-%j"
        )
        number = self.call("sbatch", "--parsable", f"--output={output}", *words, **environment).strip()
        return Job(self, number)

    def start_node(self, name: str) -> None:
        self.call("slurmd", "-N", name)

    def lose_node(self, name: str) -> None:
        """Kill all that runs on a node at once, as a power failure would."""
        tasks = []
        for pid, said in processes_of(self.folder).items():
            if f"SLURMD_NODENAME={name}" in said:
                with suppress(psutil.NoSuchProcess):
                    tasks.append(psutil.Process(pid))
        watchers = {parent for task in tasks if (parent := task.parent()) is not None and parent.name() == "slurmstepd"}
        node = psutil.Process(int((self.folder / f"slurmd-{name}.pid").read_text()))
        for process in [node, *watchers, *tasks]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


class Job:
    """A job of the cluster's."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self._cluster, self.number = cluster, number

    def __getitem__(self, field: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        shown = self._cluster.call("scontrol", "show", "job", self.number, "--oneliner")
        return re.findall(rf"\b{field}=(\S*)", shown)[0]

    @property
    def out(self) -> str:
        """What it has printed."""
        file = self._cluster.folder / f"out-{self.number}"
        return file.read_text() if file.exists() else ""

    def until_said(self, pattern: str) -> str:
        """Wait until its output has a match; returns the output."""
        end = time.monotonic() + ANSWER_SECONDS
        while not re.search(pattern, self.out):
            state = self["JobState"]
            assert time.monotonic() < end and state in GOING_ON, f"{state}\n{self.out}"
            time.sleep(0.2)
        return self.out

    def until(self, *states: str) -> str:
        """Wait for a state; returns the output."""
        end = time.monotonic() + ANSWER_SECONDS
        while self["JobState"] not in states:
            assert time.monotonic() < end, f"{self['JobState']} {self['Reason']}\n{self.out}"
            time.sleep(0.3)
        return self.out

    def start_again(self) -> None:
        """Start a requeued job soon: Slurm lets it wait for two minutes.

        Not at once: a node refuses a job that it ended in the same second, and a node that was lost is asked to end the
        job's old tasks and taken to be free when it answers, with a new job on it as well.
        """
        self.until("PENDING")
        self._cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")

    def signal(self, name: str) -> None:
        """Send a signal to the job's tasks."""
        self._cluster.call("scancel", f"--signal={name}", self.number)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm of three nodes; nothing of it is left afterwards."""
    cluster = Cluster(folder)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    first_job = 10_000 + os.getpid() % 1_000_000  # files of an earlier cluster's jobs may be left in .cache
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={os.cpu_count()}"
        for node in NODES
    ]
    written = CONFIGURATION.format(host=host, folder=folder, port=free_port(), first_job=first_job)
    settings, partitions = written.split("PartitionName", 1)
    (folder / "slurm.conf").write_text("\n".join([settings, *nodes, f"PartitionName{partitions}"]))
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    try:
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        cluster.call("munged", "--force", f"--log-file={folder / 'munged.log'}", *options)
        cluster.call("slurmctld")
        for node in NODES:
            cluster.start_node(node)
        end = time.monotonic() + ANSWER_SECONDS
        while cluster.call("sinfo", "--noheader", "--partition=all", "--format=%T %D").split() != [
            "idle",
            str(len(NODES)),
        ]:
            assert time.monotonic() < end, cluster.call("sinfo")
            time.sleep(0.3)
        yield cluster
    finally:
        for pid in processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(folder)

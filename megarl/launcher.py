"""Starts the ranks of a job on this node, and ends them together.

Unlike torchrun it keeps the exit code of the rank that failed, forwards a signal once and then waits for the ranks to
save, kills the others at once when a rank fails, and says nothing that a rank has said already.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import FrameType

from megarl.endings import NOTES_VARIABLE, Ending, ExitCode, noted_phase
from megarl.host import host_memory
from megarl.interfaces import say, stay_on_interface
from megarl.nodes import Node, Nodes
from megarl.parallel.meeting import PREFIX_VARIABLE, STORE_VARIABLE
from megarl.private_folder import private_folder
from megarl.processes import STOP_SIGNALS, adopt_orphans, children, how_it_ended, kill_descendants, signals_handled

POLL_SECONDS = 0.1
STOP_GRACE = 30.0  # ranks that stop together end at different times: rank 0 still closes the metric files
FORCED_GRACE = 5.0  # what a second signal leaves a rank to end itself


def launch(command: Sequence[str], node: Node, *, timeout_minutes: float) -> int:
    """Run the command as every rank of this node, to its end, once; `megarl.supervisor` starts it again.

    Args:
        timeout_minutes: how long the nodes wait for each other.

    Returns:
        0 if all ranks gave 0; else the code of the first that failed, or 128 + s if signal s killed it.

    Raises:
        ValueError: the nodes do not meet, or were started with different things; see `Nodes`.
    """
    nodes = Nodes(node, timeout_minutes) if node.nnodes > 1 else None
    with noted_signals() as noted:
        ending = attempt(command, node, nodes, noted)
        if nodes is not None:
            nodes.leave(ending.code, STOP_GRACE)
    return ending.code


def attempt(command: Sequence[str], node: Node, nodes: Nodes | None, noted: list[signal.Signals]) -> Ending:
    """Start the ranks of this node, and wait until the last one has ended.

    Args:
        nodes: of several nodes, their meeting, which says the place of this one.
        noted: the stop signals that arrive meanwhile.
    """
    spared = children()  # of a program that calls this as a function
    adopt_orphans()
    node = nodes.node if nodes is not None else node
    with _folder() as folder:
        try:
            ranks = _start(command, {**_meeting_place(node, nodes, folder), NOTES_VARIABLE: folder}, node)
            return _Ranks(ranks, node, nodes, noted, folder).wait()
        finally:
            kill_descendants(spared)


def _meeting_place(node: Node, nodes: Nodes | None, folder: str) -> dict[str, str]:
    """Return the variables that tell ranks where they meet: on one node in a file that no other user can open."""
    if nodes is None:
        file = os.path.join(folder, "store")
        return {"MASTER_ADDR": node.master_addr, "MASTER_PORT": "0", STORE_VARIABLE: file}
    place = {"MASTER_ADDR": node.master_addr, "MASTER_PORT": str(nodes.port), STORE_VARIABLE: ""}
    place[PREFIX_VARIABLE] = f"ranks/{nodes.plan.attempt}"
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's env:// joins the launcher's store, and makes none
    return place


def _folder() -> AbstractContextManager[str]:
    """Make a folder for the meeting place, in memory, where every system has locks for files."""
    return private_folder("megarl-job-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Collect the stop signals that arrive meanwhile, in order."""
    noted: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(number))

    with signals_handled(STOP_SIGNALS, note):
        yield noted


def _start(command: Sequence[str], place: Mapping[str, str], node: Node) -> list[subprocess.Popen[bytes]]:
    ranks = []
    common = {**os.environ, **place}
    if node.nnodes > 1:
        stay_on_interface(node.master_addr, common)
    # A rank starts with stop signals blocked, and takes them when it can: while Python starts, they print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for local_rank in range(node.nproc):
            environment = {
                "RANK": node.node_rank * node.nproc + local_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": node.nnodes * node.nproc,
                "LOCAL_WORLD_SIZE": node.nproc,
                "MEGARL_LAUNCHER": os.getpid(),
            }
            ranks.append(
                subprocess.Popen(
                    command,
                    env=common | {name: str(value) for name, value in environment.items()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
                )
            )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return ranks


class _Ranks:
    """Watches the ranks of this node from their start to their end."""

    def __init__(
        self,
        ranks: list[subprocess.Popen[bytes]],
        node: Node,
        nodes: Nodes | None,
        noted: list[signal.Signals],
        notes: str,
    ) -> None:
        """
        Args:
            notes: the folder with what ranks tell the launcher.
        """
        self._processes, self._node, self._nodes, self._noted, self._notes = ranks, node, nodes, noted, notes
        self._forwarded: set[signal.Signals] = set()
        self._end_by: float | None = None  # when what is left of the ranks is killed
        self._ending: Ending | None = None  # of the first rank that failed
        self._unsaid: str | None = None  # says which rank was stopped: news only if the others do not follow

    def wait(self) -> Ending:
        """Wait until the last rank has ended; return how the first one ended that failed."""
        alive = dict(enumerate(self._processes))
        while alive:
            self._forward(list(alive.values()))
            for rank in [rank for rank, process in alive.items() if process.poll() is not None]:
                self._ended(rank, alive.pop(rank))
            if self._ending is None:
                self._look_at_other_nodes()
            if self._end_by is not None and time.monotonic() >= self._end_by:
                if alive and self._unsaid:
                    say(self._unsaid)
                for process in alive.values():
                    process.kill()
                    process.wait()
                break
            time.sleep(POLL_SECONDS)
        ending = self._ending or self._as_ending(0)
        return replace(ending, asked=bool(self._forwarded or self._noted))

    def _as_ending(self, code: int, rank: int | None = None, phase: str = "") -> Ending:
        number = self._nodes.number if self._nodes is not None else 0
        return Ending(code=code, rank=rank, node=number, host=socket.gethostname(), phase=phase)

    def _forward(self, alive: list[subprocess.Popen[bytes]]) -> None:
        while self._noted:
            number = self._noted.pop(0)
            if self._forwarded:
                self._end_within(FORCED_GRACE)
                self._ending = self._ending or self._as_ending(128 + number)
            self._forwarded.add(number)
            for process in alive:
                process.send_signal(number)

    def _ended(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.returncode
        if code == 0 or self._ending is not None:
            return
        number = self._node.node_rank * self._node.nproc + rank
        ending = self._as_ending(code if code > 0 else 128 - code, number, noted_phase(self._notes, number))
        self._ending, stopped = ending, ending.code - 128 in STOP_SIGNALS
        # A rank that failed cannot be waited for, and the others could not save without it.
        self._end_within(STOP_GRACE if stopped else 0.0)
        if self._nodes is not None and not stopped:
            self._nodes.note_failure(ending)
        who = f"rank {number} (pid {process.pid} on {socket.gethostname()})"
        if stopped:
            self._unsaid = None if self._forwarded else f"{who} was ended by {signal.Signals(ending.code - 128).name}"
        elif code not in set(ExitCode):  # of which the rank has said why
            say(f"{who} {how_it_ended(code)}{_cause(code)}")

    def _look_at_other_nodes(self) -> None:
        self._ending = self._nodes.failure() if self._nodes is not None else None
        if self._ending is not None:
            self._end_within(0.0)

    def _end_within(self, seconds: float) -> None:
        end_by = time.monotonic() + seconds
        self._end_by = end_by if self._end_by is None else min(self._end_by, end_by)


def _cause(code: int) -> str:
    """Say what may have ended a rank, a sentence's end; empty if the code does not tell.

    The kernel keeps the most memory that any child held that was waited for.
    """
    if -code == signal.SIGBUS:
        return "; a file that it maps, such as a cached one of data.cache_dir, was cut short, or /dev/shm is full"
    if -code != signal.SIGKILL:
        return ""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return (
        f"; if nobody sent it, memory ran out: the rank held up to {peak / 2**30:.1f} GiB of this machine's "
        f"{host_memory() / 2**30:.1f} GiB"
    )

"""Starts the ranks of a job on this node, and ends them together.

Unlike torchrun it keeps the exit code of the rank that failed, forwards a signal once and then waits for the ranks to
save, kills the others at once when a rank fails, and says nothing that a rank has said already.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

from torch.distributed import DistError, TCPStore

from megarl.processes import STOP_SIGNALS, adopt_orphans, children, kill_descendants

POLL_SECONDS = 0.1
NODE_POLL_SECONDS = 1.0  # how often a node asks whether another one has failed
STOP_GRACE = 30.0  # ranks that stop together end at different times: rank 0 still draws the learning curve
FORCED_GRACE = 5.0  # what a second signal leaves a rank to end itself
_FAILED, _DONE = "megarl/failed", "megarl/done"


@dataclass(frozen=True, kw_only=True)
class Node:
    """This node's place in the job.

    Attributes:
        nproc: ranks to start here, as on every other node.
        master_addr, master_port: where the first node's launcher keeps the store in which all ranks meet; port 0 takes
            a free one, which only ranks of the same node can know.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def launch(command: Sequence[str], node: Node, *, timeout_minutes: float) -> int:
    """Run the command as every rank of this node, to its end.

    Args:
        timeout_minutes: how long the nodes wait for the first one's launcher.

    Returns:
        0 if all ranks gave 0; else the code of the first that failed, or 128 + s if signal s killed it.

    Raises:
        ValueError: the store cannot be reached or its port is taken.
    """
    spared = children()  # of a program that calls this as a function
    adopt_orphans()
    store = _meet(node, timeout_minutes)
    with _noted_signals() as noted:
        try:
            ranks = _start(command, node, store.port)
            code = _Job(ranks, node, store, noted).wait()
        finally:
            kill_descendants(spared)
        if node.nnodes > 1:
            _leave(store, node, code)
    return code


def _meet(node: Node, timeout_minutes: float) -> TCPStore:
    """The job's store. A launcher keeps it, so it is there as long as any rank of the first node."""
    timeout = timedelta(minutes=timeout_minutes)
    if node.node_rank == 0:
        try:
            return TCPStore("127.0.0.1", node.master_port, is_master=True, wait_for_workers=False, timeout=timeout)
        except DistError as e:
            raise ValueError(f"port {node.master_port} of this host is in use; give another --master-port") from e
    end = time.monotonic() + timeout.total_seconds()
    while True:  # torch's client would warn of every attempt
        with suppress(OSError), socket.create_connection((node.master_addr, node.master_port), timeout=5):
            break
        if time.monotonic() > end:
            raise ValueError(
                f"no launcher of node 0 answers at {node.master_addr}:{node.master_port}; "
                f"start it there, or check --master-addr and --master-port"
            )
        time.sleep(0.2)
    return TCPStore(node.master_addr, node.master_port, is_master=False, timeout=timeout)


@contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """Stop signals that arrive meanwhile, in order."""
    noted: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], node: Node, port: int) -> list[subprocess.Popen[bytes]]:
    ranks = []
    # A rank starts with stop signals blocked, and takes them when it can: as Python starts, one would be a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for local_rank in range(node.nproc):
            environment = {
                "RANK": node.node_rank * node.nproc + local_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": node.nnodes * node.nproc,
                "LOCAL_WORLD_SIZE": node.nproc,
                "MASTER_ADDR": node.master_addr,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # torch's env:// joins the launcher's store, and makes none
                "MEGARL_LAUNCHER": os.getpid(),
            }
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | {name: str(value) for name, value in environment.items()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
                )
            )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return ranks


class _Job:
    """The ranks of this node from their start to their end."""

    def __init__(
        self, ranks: list[subprocess.Popen[bytes]], node: Node, store: TCPStore, noted: list[signal.Signals]
    ) -> None:
        self._ranks, self._node, self._store, self._noted = ranks, node, store, noted
        self._forwarded: set[signal.Signals] = set()
        self._end_by: float | None = None  # when what is left of the ranks is killed
        self._next_look = 0.0
        self._code = 0
        self._unsaid: str | None = None  # of a rank that was stopped, which is news only if the others do not follow

    def wait(self) -> int:
        """Until the last rank has ended; returns the job's exit code."""
        alive = dict(enumerate(self._ranks))
        while alive:
            self._forward(list(alive.values()))
            for rank in [rank for rank, process in alive.items() if process.poll() is not None]:
                self._ended(rank, alive.pop(rank))
            if self._code == 0:
                self._look_at_other_nodes()
            if self._end_by is not None and time.monotonic() >= self._end_by:
                if alive and self._unsaid:
                    _say(self._unsaid)
                for process in alive.values():
                    process.kill()
                    process.wait()
                break
            time.sleep(POLL_SECONDS)
        return self._code

    def _forward(self, alive: list[subprocess.Popen[bytes]]) -> None:
        while self._noted:
            number = self._noted.pop(0)
            if self._forwarded:
                self._end_within(FORCED_GRACE)
                self._code = self._code or 128 + number
            self._forwarded.add(number)
            for process in alive:
                process.send_signal(number)

    def _ended(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.returncode
        if code == 0 or self._code:
            return
        self._code = code if code > 0 else 128 - code
        stopped = self._code - 128 in STOP_SIGNALS
        # A rank that failed cannot be waited for, and the others could not save without it.
        self._end_within(STOP_GRACE if stopped else 0.0)
        if self._node.nnodes > 1 and not stopped:
            with suppress(DistError):
                self._store.set(_FAILED, str(self._code))
        number = self._node.node_rank * self._node.nproc + rank
        who = f"rank {number} (pid {process.pid} on {socket.gethostname()})"
        if stopped:
            self._unsaid = None if self._forwarded else f"{who} was ended by {signal.Signals(self._code - 128).name}"
        elif code < 0:
            _say(f"{who} was killed by {signal.Signals(-code).name}")
        elif code > 2:  # of 1 and 2 the rank has said why
            _say(f"{who} ended with exit code {code}")

    def _look_at_other_nodes(self) -> None:
        if self._node.nnodes == 1 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + NODE_POLL_SECONDS
        try:
            if self._store.check([_FAILED]):
                self._code = int(self._store.get(_FAILED))  # its launcher says why
                self._end_within(0.0)
        except DistError:
            self._code = 1
            self._end_within(0.0)
            _say(f"node {self._node.node_rank}: the launcher of node 0 is gone")

    def _end_within(self, seconds: float) -> None:
        end_by = time.monotonic() + seconds
        self._end_by = end_by if self._end_by is None else min(self._end_by, end_by)


def _leave(store: TCPStore, node: Node, code: int) -> None:
    """The first node leaves last: its launcher keeps the store, in which the others look for failures."""
    with suppress(DistError):
        done = store.add(_DONE, 1)
        end = time.monotonic() + (STOP_GRACE if code == 0 else 3 * NODE_POLL_SECONDS)
        while node.node_rank == 0 and done < node.nnodes and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            done = store.add(_DONE, 0)


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it; the ranks go on
        print(f"megarl: {text}", file=sys.stderr, flush=True)

"""Forks, feeds and ends workers, in a loop of one process. Torch-free.

The process runs no user's code, so that it always answers, and has one thread, so that a fork is safe and cheap. What a
worker leaves behind becomes this process's child, and ends with the worker.
"""

from __future__ import annotations

import faulthandler
import heapq
import os
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import FrameType
from typing import Generic, NoReturn, TypeVar

from megarl.processes import STOP_SIGNALS, adopt_orphans, children, die_with_parent, end_with_descendants, kill_tree
from megarl.workers.channel import Channel

_DUMP_SIGNAL = signal.SIGRTMAX - 1  # makes a worker write where its Python code is; a number that nobody else uses
_DUMP_SECONDS = 0.1  # between asking for the frames and SIGKILL
_EXIT_SECONDS = 1.0  # between the end of a connection and that of its process
_LONGEST_ANSWER = 1 << 20  # bytes


@dataclass(eq=False, kw_only=True)
class ForkedWorker:
    """Holds a forked process, on the side of the process that forked it.

    Attributes:
        dump: descriptor of the file that the process writes its frames to.
        connected: whether the channel is open.
        late: whether the process is being ended for its deadline.
        why: why it is being ended, if not for its deadline.
    """

    pid: int
    channel: Channel
    dump: int
    connected: bool = True
    late: bool = False
    why: str = ""


W = TypeVar("W", bound=ForkedWorker)


class ForkedWorkers(ABC, Generic[W]):
    """Loops over the messages of one owner and of forked workers, the workers' ends, and events at certain times.

    Attributes:
        workers: those that have not ended, by pid.
    """

    def __init__(self, owner: Channel) -> None:
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner, selectors.EVENT_READ, self._from_owner)
        self.workers: dict[int, W] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wake, self._wakes = socket.socketpair()
        for end in (self._wake, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)

    @abstractmethod
    def accept(self, message: bytes) -> None:
        """Take a message of the owner."""

    @abstractmethod
    def answered(self, worker: W, message: bytes) -> None:
        """Take a message of a worker that is not late."""

    @abstractmethod
    def ended(self, worker: W, code: int, dump: str) -> None:
        """Go on after the end of a worker.

        Args:
            code: its exit code; a signal's number is negative.
            dump: the frames that `faulthandler` wrote; empty if it was not ended for its deadline and did not crash.
        """

    @abstractmethod
    def hand_out(self) -> None:
        """Give workers what they can take; called before each wait."""

    def run(self) -> NoReturn:
        """Run the loop until the owner is gone."""
        while True:
            now = time.monotonic()
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            self.hand_out()
            self._watch_writes()
            timeout = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            for key, _ in self._selector.select(timeout):
                key.data()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have the loop call a function later."""
        heapq.heappush(self._events, (time.monotonic() + seconds, next(self._order), event))

    def start(self, kind: type[W], serve: Callable[[Channel], object]) -> W:
        """Fork a worker that runs a function with its end of a channel."""
        connection, other_end = socket.socketpair()
        dump, parent = os.memfd_create("frames"), os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (self._selector, self._owner, self._wake, self._wakes, connection):
                    end.close()
                for other in self.workers.values():
                    other.channel.close()
                    os.close(other.dump)
                _begin(dump, parent)
                serve(Channel(other_end))
            finally:
                os._exit(1)
        other_end.close()
        worker = kind(pid=pid, channel=Channel(connection, _LONGEST_ANSWER), dump=dump)
        self.workers[pid] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._from_worker(worker))
        return worker

    def end_late(self, worker: W) -> None:
        """Have a worker write its frames, and kill it."""
        worker.late = True
        with suppress(ProcessLookupError):
            os.kill(worker.pid, _DUMP_SIGNAL)
        self.after(_DUMP_SECONDS, lambda: self.kill(worker))

    def kill(self, worker: W, why: str = "") -> None:
        """Kill a worker with all that it has started."""
        if self.workers.get(worker.pid) is worker:
            worker.why = worker.why or why
            kill_tree(worker.pid)

    # ---------------------------------------------------------------------------------------------- what happens

    def _from_owner(self) -> None:
        self._owner.flush()
        try:
            messages = self._owner.receive()
        except EOFError:
            end_with_descendants()
        for message in messages:
            self.accept(message)

    def _from_worker(self, worker: W) -> None:
        if self.workers.get(worker.pid) is not worker:  # its end was among the same events
            return
        worker.channel.flush()
        try:
            self._receive(worker)
        except EOFError:  # it ends, which SIGCHLD tells; or a user's function has closed the connection
            self._selector.unregister(worker.channel)
            worker.connected = False
            self.after(_EXIT_SECONDS, lambda: self.kill(worker, "closed its connection"))

    def _receive(self, worker: W) -> bool:
        messages = worker.channel.receive()
        for message in messages:
            if not worker.late:
                self.answered(worker, message)
        return bool(messages)

    def _watch_writes(self) -> None:
        """Wake up when a side that has not taken everything takes more."""
        for channel in [self._owner, *(w.channel for w in self.workers.values() if w.connected)]:
            key = self._selector.get_key(channel)
            events = selectors.EVENT_READ | (0 if channel.flush() else selectors.EVENT_WRITE)
            if key.events != events:
                self._selector.modify(channel, events, key.data)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass
        any_ended = False
        with suppress(ChildProcessError):
            while (end := os.waitpid(-1, os.WNOHANG))[0]:
                any_ended = True
                if end[0] in self.workers:
                    self._forget(self.workers.pop(end[0]), os.waitstatus_to_exitcode(end[1]))
        if any_ended:
            for child in children():  # left behind by a worker that has ended
                if child.pid not in self.workers:
                    kill_tree(child.pid)

    def _forget(self, worker: W, code: int) -> None:
        with suppress(EOFError):
            while self._receive(worker):  # messages from before its end
                pass
        if worker.connected:
            self._selector.unregister(worker.channel)
        worker.channel.close()
        dump = os.pread(worker.dump, 1 << 16, 0).decode(errors="replace")
        os.close(worker.dump)
        self.ended(worker, code, dump)


def _begin(dump: int, parent: int) -> None:
    """Prepare a forked process for code that may do anything to it."""
    die_with_parent(parent)
    adopt_orphans()  # what a function left behind is found below this process, and ends with it
    os.nice(5)  # decoding comes first where cores are few
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
        f.write("1000")  # where memory is short, no rank must be what the kernel ends
    _outlive_stop_signals()
    faulthandler.enable(file=dump, all_threads=False)
    faulthandler.register(_DUMP_SIGNAL, file=dump, all_threads=False, chain=False)


def _outlive_stop_signals() -> None:
    """Go on when a run is stopped: all its processes get the signal, and the ranks need scores until they have saved.

    The signals are not ignored: programs that a function starts would inherit that, and could not be terminated.
    """
    pid = os.getpid()

    def stay(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a forked child
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in STOP_SIGNALS:
        signal.signal(signum, stay)

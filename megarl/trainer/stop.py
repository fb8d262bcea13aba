"""Takes signals to a run: before the loop they end the process, in the loop they end the run after a checkpoint."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from megarl.processes import STOP_SIGNALS, end_now, signals_handled
from megarl.telemetry.log_file import LOG

if TYPE_CHECKING:  # a rank takes signals before it has imported torch
    from megarl.parallel.world import World

RELAYED_SECONDS = 2.0  # a launcher sends a signal on that its ranks have got from the terminal or from Slurm already


class StopRequest:
    """Notes the `STOP_SIGNALS` that this rank gets, and lets all ranks agree to stop.

    Signals are noticed by a thread of their own: Python runs a handler only between two bytecodes of the main thread,
    which may wait inside a collective for minutes.
    """

    ending: signal.Signals | None = None
    """The signal that ends this process now, whatever its main thread does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._asked: signal.Signals | None = None
        self._timeout: float | None = None  # None: nothing to save yet
        self._saves = False

    def install(self) -> None:
        """Take the signals from now on; called once, by the main thread."""
        written, read = socket.socketpair()
        written.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, _noticed_elsewhere)
            signal.siginterrupt(number, False)  # a system call of a library must not fail with EINTR
        # A forked helper that is ended by SIGTERM would otherwise write into this process's socket: a stop of the run.
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._listen, args=(read, written), daemon=True, name="megarl-signals").start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher blocked them

    @contextmanager
    def borrow(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM in a process of somebody else's, such as a notebook, which has them back afterwards.

        Their handlers run between two bytecodes: enough for a single rank, which waits for no other. Before the loop,
        or a second time, a signal raises its `interruption` wherever the process is.
        """
        if threading.current_thread() is not threading.main_thread():  # Python lets no other thread have them
            yield
            return
        with signals_handled((signal.SIGINT, signal.SIGTERM), self._borrowed):
            yield

    def _borrowed(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self._timeout is None or self._asked is not None:
            raise interruption(received)
        self._note(received)

    def defer(self, timeout: float, *, saves: bool) -> None:
        """Leave signals to the loop, which asks `agreed`; a signal ends the process only if that takes too long.

        Args:
            timeout: seconds from the first signal to the process's end (`trainer.stop_timeout`).
            saves: whether the loop saves a checkpoint before it leaves.
        """
        self._timeout, self._saves = timeout, saves

    def agreed(self, world: World) -> signal.Signals | None:
        """Return the signal that any rank got, the same on every rank; every rank calls it."""
        number = world.maximum(self._asked or 0, "whether to stop")
        return signal.Signals(number) if number else None

    def _listen(self, read: socket.socket, written: socket.socket) -> None:
        del written  # only kept open: a socket that nobody refers to is closed
        first = 0.0
        while True:
            left = None if self._asked is None or self._timeout is None else first + self._timeout - time.monotonic()
            if left is not None and (left <= 0 or not select.select([read], [], [], left)[0]):
                assert self._asked is not None
                self._end(self._asked, f"the step was not done within trainer.stop_timeout = {self._timeout:g} s")
            for number in read.recv(64):
                if number not in STOP_SIGNALS:
                    continue
                received = signal.Signals(number)
                if self._timeout is None:
                    self._end(received, "stopped before the first step")
                if self._asked is None:
                    first = time.monotonic()
                    self._note(received)
                elif time.monotonic() - first > RELAYED_SECONDS:
                    self._end(received, "ended at once by a second signal")

    def _note(self, asked: signal.Signals) -> None:
        self._asked = asked
        plan = "saving" if self._saves else "stopping"
        self._say(f"{asked.name}: {plan} after this step; a second signal ends the run at once")

    def _end(self, asked: signal.Signals, why: str) -> None:
        self.ending = asked
        self._say(f"{asked.name}: {why}")
        end_now(128 + asked)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            LOG.write(f"megarl: {text}\n")
            with suppress(OSError):  # nobody listens any more
                os.write(2, f"megarl: {text}\n".encode())  # the main thread may hold the lock of sys.stderr


def interruption(asked: signal.Signals) -> BaseException:
    """Return what a signal raises in Python: KeyboardInterrupt for SIGINT, SystemExit with 128 + signal for others."""
    return KeyboardInterrupt() if asked is signal.SIGINT else SystemExit(128 + asked)


def _noticed_elsewhere(number: int, frame: FrameType | None) -> None:
    """Do nothing: bytes in the wake-up socket tell the thread, and without a handler Python would not write them."""


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)

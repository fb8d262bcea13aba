"""Runs code of others in a fresh interpreter, on what nobody trusts, and reads its answers."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megarl.isolation.launch import IsolatedProcess, Isolation, Limits, SandboxError, start_isolated
from megarl.workers.channel import Channel, wait_for
from megarl.workers.installed import files_of
from megarl.workers.server import BROKEN, FORKED, READY

START_SECONDS = 300.0
"""That loading the code may take where files are slow and cores are few."""

LONGEST = 64 << 20
"""Bytes of an answer that is believed."""

_FORK_SECONDS = 60.0
_REQUESTS = 64  # that a forked process answers: what it holds in memory ends with it
_PROCESSES = 8  # of the sandbox: the server, the forked one, and such as are just ending


class WorkerError(RuntimeError):
    """The process cannot be started; the message is one line."""


class Child:
    """Answers requests by a function that another process calls; it ends with this one.

    The process is a fresh interpreter with an empty environment. It loads the function once, and forks processes that
    call it. A forked process can do nothing but compute, read and answer (`megarl.isolation.compute_only`); one that is
    late, ends, or answers what is no JSON is replaced. It answers up to 64 requests.

    With isolation "namespaces" all of them are in a sandbox that has no network, and no file but Python's library, this
    package and the named distributions. With "process" they have this user's files: unsafe where a response may run.
    """

    def __init__(
        self,
        target: str,
        *,
        distributions: Sequence[str] = (),
        isolation: Isolation = "namespaces",
        memory: int = 4096,
    ) -> None:
        """
        Args:
            target: "module:function" of the function, (request) -> answer.
            distributions: installed packages that it imports, as requirements; what they require comes with them.
            memory: MiB of address space of a process, and of what all hold together.
        """
        self._target, self._distributions = target, tuple(distributions)
        self._isolation, self._memory = isolation, memory
        self._lock = threading.Lock()
        self._owner = 0
        self._process: IsolatedProcess | None = None
        self._control: socket.socket | None = None
        self._connection: Channel | None = None  # to the forked process
        self._left = 0  # requests that it answers still

    def start(self) -> None:
        """Start the process if it does not run; the first `ask` does it, too.

        Raises:
            WorkerError: it cannot be started, or the function cannot be loaded.
        """
        with self._lock:
            self._run()

    @property
    def pid(self) -> int | None:
        """Return the pid of the process that holds all others; None: it was never started, or is closed."""
        return self._process.pid if self._process is not None else None

    def ask(self, request: Any, *, timeout: float) -> Any:
        """Return the function's answer; None: it is late or no JSON, or the process ended.

        Args:
            request: JSON.
            timeout: seconds.

        Raises:
            WorkerError: the process cannot be started, or the function cannot be loaded.
        """
        message = json.dumps(request).encode()
        with self._lock:
            self._run()
            if not self._left:
                self._fork()
            try:
                answer = json.loads(self._exchange(message, time.monotonic() + timeout))
                self._left -= 1
            except (OSError, EOFError, ValueError, RecursionError):  # a TimeoutError is an OSError
                answer, self._left = None, 0
            except BaseException:  # a deadline of the caller's: the next answer would be taken for another's
                self._renew()
                raise
            if not self._left:
                self._renew()
            return answer

    def close(self) -> None:
        """End the process with all that it forked."""
        with self._lock:
            self._stop()

    def _exchange(self, message: bytes, deadline: float) -> bytes:
        assert self._connection is not None
        self._connection.send(message)
        messages: list[bytes] = []
        while not messages:
            self._connection.wait(deadline)
            messages = self._connection.receive()
        if len(messages) > 1 or not self._connection.is_between_messages:  # the rest would be the next answer
            raise EOFError
        return messages[0]

    # ------------------------------------------------------------------------------------------- the processes

    def _run(self) -> None:
        if self._process is not None and self._owner != os.getpid():  # in a fork the process is still the parent's
            for end in (self._control, self._connection):
                if end is not None:
                    end.close()
            self._process, self._control, self._connection, self._left = None, None, None, 0
        if self._process is not None and not self._process.poll():
            return
        self._stop()
        self._control, other_end = socket.socketpair()
        self._owner = os.getpid()
        with other_end:
            self._process = self._start(other_end)
        try:
            word = self._next_word(START_SECONDS)
            if word != READY:
                raise WorkerError(self._why(word))
            self._fork()
        except BaseException:
            self._stop()
            raise

    def _start(self, control: socket.socket) -> IsolatedProcess:
        shown, roots = files_of(self._distributions)
        try:
            return start_isolated(
                _program(roots, self._target),
                channel=control,
                folders=[_PACKAGE, *shown],
                imports_from=(),
                limits=Limits(memory=self._memory, processes=_PROCESSES, disk=1),
                isolation=self._isolation,
            )
        except SandboxError as e:
            raise WorkerError(str(e)) from e

    def _fork(self) -> None:
        """Fork a process that has answered nothing; the one before, if there is one, is killed."""
        self._hang_up()
        assert self._control is not None
        connection, other_end = socket.socketpair()
        try:
            with other_end, suppress(OSError):
                socket.send_fds(self._control, [b"+"], [other_end.fileno()])
            word = self._next_word(_FORK_SECONDS)
            if word != FORKED:
                raise WorkerError(self._why(word))
        except BaseException:
            connection.close()
            self._stop()
            raise
        self._connection, self._left = Channel(connection, LONGEST), _REQUESTS

    def _renew(self) -> None:
        """Kill the forked process, whatever it does, and have another; where that fails, `_run` starts anew."""
        with suppress(WorkerError):
            self._fork()

    def _next_word(self, seconds: float) -> bytes:
        """Wait for the server's next word; empty: nothing in time, or it has ended."""
        assert self._control is not None
        word = b""
        with suppress(OSError):
            wait_for(self._control, select.POLLIN, time.monotonic() + seconds)
            word = self._control.recv(1)
            if word == BROKEN:
                while part := self._control.recv(1 << 16):
                    word += part
        return word

    def _why(self, word: bytes) -> str:
        lines = word.removeprefix(BROKEN).decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "it ended, or said nothing in time")
        return f"the process for {self._target} does not start: {reason}"

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._left = None, 0

    def _stop(self) -> None:
        self._hang_up()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.close()
        self._process, self._control = None, None


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _program(roots: Sequence[str], target: str) -> str:
    """Write the interpreter's program, without the faces of packages, which import what the function does not need."""
    parts = target.partition(":")[0].split(".")[:-1]
    faces = {".".join(parts[: i + 1]): os.path.join(_PACKAGE, *parts[1 : i + 1]) for i in range(len(parts))}
    faces |= {"megarl": _PACKAGE, "megarl.workers": os.path.join(_PACKAGE, "workers")}
    return f"""
import sys
sys.path += {list(roots)!r}
for name, folder in {faces!r}.items():
    sys.modules[name] = module = type(sys)(name)
    module.__path__ = [folder]
from megarl.workers.server import main
main(3, {target!r})
"""

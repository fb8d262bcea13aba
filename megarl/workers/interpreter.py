"""Starts a fresh interpreter that works for this process, and ends with it. Torch-free.

It inherits no GPU, no process group and no thread, as a fork would, and imports from where this process does, but
nothing from the working directory, where files of a stranger's may lie that have the names of packages.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from megarl.processes import STOP_SIGNALS, adopt_orphans, end_with_descendants, tell_of_parents_end
from megarl.workers.channel import read_message, write_message

_PROGRAM = """
import sys
sys.path[:] = sys.argv[4:]
from megarl.workers.interpreter import main
main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


class Interpreter:
    """Calls one function in a process of its own, with a socket that is connected to this process.

    The process is in a session of its own: a terminal's Ctrl-C is this process's to act on. It ends when the function
    returns, when it is closed, or when this process ends, and with it all that it has started.

    Attributes:
        process: the process.
    """

    def __init__(self, target: str, *, environment: Mapping[str, str] | None = None, output: int = 2) -> None:
        """
        Args:
            target: "module:function" of the function.
            environment: variables beside those of this process.
            output: descriptor for what the process prints; default this process's stderr.
        """
        self._connection, other_end = socket.socketpair()
        with other_end:
            paths = [path for path in sys.path if path]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, target, str(other_end.fileno()), str(os.getpid()), *paths],
                pass_fds=[other_end.fileno()],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output == 2 else output,
                start_new_session=True,
            )

    def send(self, message: bytes) -> None:
        """Write a message, waiting until there is room for it; raises OSError if the process has gone."""
        write_message(self._connection.fileno(), message)

    def pass_on(self, connections: Sequence[socket.socket]) -> None:
        """Hand over connections, which `socket.recv_fds` receives there; raises OSError if the process has gone."""
        socket.send_fds(self._connection, [b"\0"], [connection.fileno() for connection in connections])

    def receive(self) -> bytes | None:
        """Wait for a message; None if the process has gone."""
        return read_message(self._connection.fileno())

    def hang_up(self) -> None:
        """End the connection, which tells the process to end, and whoever waits for a message here."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float = 0.0) -> None:
        """End the process, and wait for that.

        Args:
            seconds: that it may take to end by itself, before it is killed.
        """
        self.hang_up()
        self._connection.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main(target: str, descriptor: int, parent: int) -> NoReturn:
    """Call a function, in the process of an `Interpreter`.

    Stop signals do not end it: what stops a run is sent to all its processes, and is the ranks' to act on.

    Args:
        descriptor: of the socket that the function is given.
        parent: pid of the process that started this one.
    """

    def end_with_parent(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            end_with_descendants()

    for signum in STOP_SIGNALS:
        signal.signal(signum, end_with_parent)
    tell_of_parents_end(signal.SIGTERM)  # not SIGKILL: the kernel signals the end of the starting thread, too
    adopt_orphans()
    end_with_parent(signal.SIGTERM, None)  # it may have ended before the kernel was told
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(socket.socket(fileno=descriptor))
    end_with_descendants()

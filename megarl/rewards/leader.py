"""The process that leads the reward workers, as its rank has it."""

from __future__ import annotations

import json
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.rewards.supervisor import Setup
from megarl.workers.channel import framed, take_messages

_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from megarl.rewards.supervisor import main; main(int(sys.argv[1]))"
_CLOSE_SECONDS = 15.0


class Leader:
    """Starts `megarl.rewards.supervisor`; two threads, which sleep when there is nothing, carry bytes to and from it.

    Attributes:
        heard: messages that have come from it.
        gone: whether it has ended, or its connection has.
    """

    def __init__(self, setup: Setup, take: Callable[[Any], None]) -> None:
        """
        Args:
            take: gets each message in a thread, and None once it is gone.
        """
        self.heard, self.gone, self._take = 0, False, take
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *(path for path in sys.path if path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the ranks'
            )
        self.send(pickle.dumps(setup))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def send(self, message: bytes) -> None:
        """Hand a message over soon."""
        self._outgoing.put(message)

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> None:
        """End it and its workers, whatever they are doing; returns when it is gone.

        Args:
            seconds: that it may take to end by itself.
        """
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:  # its workers die with it
            self.process.kill()
            self.process.wait()

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._connection.sendall(framed(message))

    def _read(self) -> None:
        buffer = bytearray()
        with suppress(OSError):
            while read := self._connection.recv(1 << 16):
                buffer += read
                for message in take_messages(buffer):
                    self.heard += 1
                    self._take(json.loads(message))
        self.gone = True
        self._take(None)

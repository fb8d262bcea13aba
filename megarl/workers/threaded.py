"""Carries an `Interpreter`'s messages in two threads, so that nobody waits for a process that hangs. Torch-free."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.workers.interpreter import Interpreter

_CLOSE_SECONDS = 15.0


class ThreadedInterpreter(Interpreter):
    """Sends messages soon, and hands over those that arrive; the threads sleep when there is nothing.

    Attributes:
        heard: messages that have come from the process.
        gone: whether the process has ended, or its connection has.
    """

    def __init__(self, target: str, take: Callable[[Any], None], **options: Any) -> None:
        """
        Args:
            take: gets each message, which is JSON, in a thread, and None once the process is gone.
            options: of `Interpreter`.
        """
        super().__init__(target, **options)
        self.heard, self.gone, self._take = 0, False, take
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def post(self, message: bytes) -> None:
        """Hand a message over soon."""
        self._outgoing.put(message)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        self.hang_up()
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join()
        super().close(seconds)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self.send(message)

    def _read(self) -> None:
        with suppress(OSError):
            while (message := self.receive()) is not None:
                self.heard += 1
                self._take(json.loads(message))
        self.gone = True
        self._take(None)

"""A destination behind a network: a thread talks to it, and no step waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from megarl.config.secrets import hide
from megarl.config.telemetry import TelemetryConfig
from megarl.telemetry.lines import Say
from megarl.telemetry.samples import Sample

PAUSES = (1.0, 10.0, 60.0)
"""Seconds before a record that was not taken is sent again; after the last of them it is left out."""

PERIOD = 15.0
"""Seconds between two sendings, so that short steps are sent together and their share of the time stays small."""

TABLE_PERIOD = 30.0
"""Seconds between two tables of rollouts; all of them are in RUN/rollouts."""

MOST_ROWS = 100
"""That are sent together."""

Row = tuple[int, Mapping[str, float]]


class Remote(Protocol):
    """What is at the other end. Every method may take long and raise anything; one thread calls them all."""

    def open(self) -> None:
        """Connect; called again if it raised."""

    def log(self, rows: Sequence[Row]) -> None:
        """Rows in order."""

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...
    def artifact(self, path: str) -> None: ...
    def close(self) -> None: ...

    def abandon(self) -> None:
        """Called by another thread when the end of the run waits no longer: let nothing of this hold it up."""


class Background:
    """A sink whose records wait in a queue for a thread that sends them, in order.

    A server that is away for a while gets them later. Where the queue is full, further records are left out. The first
    failure is said, and at the end how many records are lost.
    """

    append_only: ClassVar = True

    def __init__(self, name: str, remote: Remote, settings: TelemetryConfig, say: Say) -> None:
        """
        Args:
            name: as in `trainer.logger`.
        """
        self._name, self._remote, self._settings, self._say = name, remote, settings, say
        self._queue: queue.SimpleQueue[Row | Callable[[Remote], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Row | Callable[[Remote], None]] = deque()  # out of the queue and not sent; the thread's
        self._taken = self._sent = 0
        self._said = self._opened = self._abandoned = False
        self._last_table = -TABLE_PERIOD
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"megarl-{name}")
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put((step, dict(metrics)))

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        now = time.monotonic()
        if now - self._last_table >= TABLE_PERIOD:
            self._last_table = now
            self._put(lambda remote: remote.rollouts(step, samples))

    def artifact(self, path: str) -> None:
        self._put(lambda remote: remote.artifact(path))

    def close(self) -> None:
        """Wait for `telemetry.close_timeout` seconds at most, and say what is lost."""
        self._leaving.set()
        self._queue.put(None)
        self._thread.join(self._settings.close_timeout)
        late, self._said = self._thread.is_alive(), True
        if late:
            self._abandoned = True
            self._remote.abandon()
        if lost := self._taken - self._sent:
            self._say(f"trainer.logger={self._name}: {lost} of {self._taken} records were not sent")
        elif late:
            self._say(
                f"trainer.logger={self._name}: no confirmation within telemetry.close_timeout = "
                f"{self._settings.close_timeout:g} s that all records have arrived"
            )

    def _put(self, record: Row | Callable[[Remote], None]) -> None:
        self._taken += 1
        if self._queue.qsize() < self._settings.queue:
            self._queue.put(record)
        else:
            self._failed(f"telemetry.queue = {self._settings.queue} records wait already, and others are left out")

    def _work(self) -> None:
        tries, more = 0, True
        while more or self._waiting:
            more = more and self._fill(1 if tries else MOST_ROWS)
            if not self._waiting:
                continue
            leaving = self._leaving.is_set()  # a try that began before may have met a server that is back by now
            try:
                if not self._opened:
                    self._remote.open()
                    self._opened = True
                self._send(1 if tries else MOST_ROWS)
                tries = 0
                self._leaving.wait(PERIOD)
            except (Exception, SystemExit) as e:  # a library's, and whatever its server makes of a record
                self._failed(f"{type(e).__name__}: {e}")
                if self._abandoned or (leaving and not self._opened):
                    return
                tries += 1
                if (tries > 1 and leaving) or tries > len(PAUSES):
                    self._waiting.popleft()
                    tries = 1  # one by one, until one is taken
                self._leaving.wait(PAUSES[tries - 1])
        if self._opened:
            try:
                self._remote.close()
            except (Exception, SystemExit) as e:
                self._failed(f"{type(e).__name__}: {e}")

    def _fill(self, most: int) -> bool:
        """Take records out of the queue, waiting for one if there are none; returns whether more can come."""
        while len(self._waiting) < most and (not self._waiting or not self._queue.empty()):
            record = self._queue.get()
            if record is None:
                return False
            self._waiting.append(record)
        return True

    def _send(self, most: int) -> None:
        """The first record, with the rows right behind it if it is one; raises what the remote raises."""
        first = self._waiting[0]
        if not isinstance(first, tuple):
            first(self._remote)
            self._waiting.popleft()
            self._sent += 1
            return
        rows: list[Row] = []
        for record in self._waiting:
            if not isinstance(record, tuple) or len(rows) == most:
                break
            rows.append(record)
        self._remote.log(rows)
        for _ in rows:
            self._waiting.popleft()
        self._sent += len(rows)

    def _failed(self, why: str) -> None:
        if not self._said:
            self._said = True
            shown = hide(" ".join(why.split()))
            self._say(f"trainer.logger={self._name}: {shown[:300]}; the run goes on, and tries again")

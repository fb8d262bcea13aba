"""Sends the records of sinks behind a network in a thread, for which no step waits."""

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
"""Seconds before a refused record is sent again; after the last of these tries it is dropped."""

PERIOD = 15.0
"""Seconds between two sendings, so that the rows of short steps share one request."""

TABLE_PERIOD = 30.0
"""Seconds between two tables of rollouts. RUN/rollouts has the rollouts of all steps."""

MOST_ROWS = 100
"""Rows in one sending at most."""

ROLLOUT_COLUMNS = ("step", "prompt", "response", "answer", "reward")
"""Columns of a table of rollouts."""

Row = tuple[int, Mapping[str, float]]


class Remote(Protocol):
    """Sends records to a server. Every method may take long and raise anything. One thread calls all but `abandon`."""

    def open(self) -> None:
        """Connect to the server; called again if it raised."""

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows in order."""

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...
    def artifact(self, path: str) -> None: ...
    def close(self) -> None: ...

    def abandon(self) -> None:
        """Let nothing of this client hold up the process's end. Called by another thread when the run stops waiting."""


class Background:
    """Keeps the records of a sink in a queue until a thread sends them in order.

    A server that is away for a while gets them later. While the queue is full, further records are dropped. The first
    failure gives a warning, and so does the number of lost records at the end.
    """

    append_only: ClassVar = True

    def __init__(self, name: str, remote: Remote, settings: TelemetryConfig, say: Say) -> None:
        """
        Args:
            name: the sink's name in `trainer.logger`.
        """
        self._name, self._remote, self._settings, self._say = name, remote, settings, say
        self._queue: queue.SimpleQueue[Row | Callable[[Remote], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Row | Callable[[Remote], None]] = (
            deque()
        )  # taken from the queue, not sent yet; only the thread uses it
        self._taken = self._sent = 0
        self._warned = self._opened = self._abandoned = False
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
        """Wait at most `telemetry.close_timeout` seconds for the thread, and warn of lost records."""
        self._leaving.set()
        self._queue.put(None)
        self._thread.join(self._settings.close_timeout)
        late, self._warned = self._thread.is_alive(), True
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
            leaving = (
                self._leaving.is_set()
            )  # read before the try: a try that began earlier may have met a server that is back by now
            try:
                if not self._opened:
                    self._remote.open()
                    self._opened = True
                self._send(1 if tries else MOST_ROWS)
                tries = 0
                self._leaving.wait(PERIOD)
            except (Exception, SystemExit) as e:  # a client library raises anything
                self._failed(f"{type(e).__name__}: {e}")
                if self._abandoned or (leaving and not self._opened):
                    return
                tries += 1
                if (tries > 1 and leaving) or tries > len(PAUSES):
                    self._waiting.popleft()
                    tries = 1  # send one at a time until the server accepts a record
                self._leaving.wait(PAUSES[tries - 1])
        if self._opened:
            try:
                self._remote.close()
            except (Exception, SystemExit) as e:
                self._failed(f"{type(e).__name__}: {e}")

    def _fill(self, most: int) -> bool:
        """Move records from the queue to `_waiting`; block until there is one. Returns False after the last record."""
        while len(self._waiting) < most and (not self._waiting or not self._queue.empty()):
            record = self._queue.get()
            if record is None:
                return False
            self._waiting.append(record)
        return True

    def _send(self, most: int) -> None:
        """Send the first record; a row together with the rows behind it. Raises what the remote raises."""
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
        if not self._warned:
            self._warned = True
            reason = hide(" ".join(why.split()))
            self._say(f"trainer.logger={self._name}: {reason[:300]}; the run goes on, and tries again")


def rollout_cells(step: int, sample: Sample) -> list[int | float | str | None]:
    """List a rollout's values in the order of `ROLLOUT_COLUMNS`. The reward is None if scoring failed."""
    return [step, sample.prompt, sample.response, sample.answer, sample.reward]

"""Processes that score responses while others are still being generated."""

from __future__ import annotations

import json
import math
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.config.reward import Reward as Settings
from megarl.rewards.channel import framed, take_messages
from megarl.rewards.judge import Failure, Judged, Response, RewardError, Scored
from megarl.rewards.parts import Part, combined
from megarl.rewards.supervisor import Setup
from megarl.rewards.worker import Task

if TYPE_CHECKING:
    from megarl.types import Prompt

_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from megarl.rewards.supervisor import main; main(int(sys.argv[1]))"
_CLOSE_SECONDS = 15.0


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """A response that is being scored.

    Attributes:
        first: number of its first call; responses that were submitted later have higher ones.
        places: of the parts that apply to it.
        found: what each call came to, with its seconds and tries, by place.
    """

    first: int
    key: Hashable
    text: str
    row: str
    places: tuple[int, ...]
    found: dict[int, tuple[Judged, float, int]] = field(default_factory=dict)

    def result(self, parts: Sequence[Part]) -> Scored | Failure:
        found = [self.found[place] for place in self.places]
        return combined(
            [parts[place] for place in self.places],
            [judged for judged, _, _ in found],
            text=self.text,
            row=self.row,
            seconds=tuple(seconds for _, seconds, _ in found),
            retried=sum(tries for _, _, tries in found),
        )


class RewardPool:
    """Scores responses in worker processes; they start when it is constructed, and end with it or with this process.

    A call that takes longer than `reward.timeout` is ended from outside, with its worker and whatever that started,
    and another worker takes its place; what a function prints is thrown away. Two threads carry bytes between this
    process and the one that leads the workers (`megarl.rewards.supervisor`); they sleep when there are none.
    """

    def __init__(self, parts: Sequence[Part], settings: Settings, workers: int) -> None:
        """
        Args:
            parts: named functions.
            workers: processes that call them.
        """
        assert all(part.reward.named for part in parts), "another process finds no function that has no name"
        self._parts, self._fails = tuple(parts), settings.on_error == "fail"
        self._waiting: dict[int, _Waiting] = {}  # by `first`, ascending
        self._done: list[_Waiting] = []
        self._calls: dict[int, _Waiting] = {}  # by number
        self._first_failure = math.inf  # `first` of the response
        self._numbers, self._ended, self._closed = 0, "", False
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        self._connection = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *(path for path in sys.path if path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the ranks'
            )
        tasks = tuple(Task(name=part.reward.name, args=part.args, kind=part.kind) for part in parts)
        self._outgoing.put(
            pickle.dumps(
                Setup(
                    tasks=tasks,
                    workers=workers,
                    timeout=settings.timeout,
                    retries=settings.retries if settings.on_error == "retry" else 0,
                    batch_size=settings.batch_size or 1,
                    concurrency=settings.concurrency,
                )
            )
        )
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, response: Response, prompt: Prompt, source: str = "") -> None:
        """Have a response scored, under a key of its own, by the parts that apply to its data source."""
        assert not self._closed, "a closed pool scores nothing"
        places = tuple(i for i, part in enumerate(self._parts) if part.applies_to(source))
        assert places, "checked before the run: some part applies to every row"
        payload = pickle.dumps((response, dict(prompt.row)))
        row = prompt.source or f"row {prompt.index}"
        with self._changed:
            one = _Waiting(first=self._numbers, key=key, text=response.text, row=row, places=places)
            self._numbers += len(places)
            self._waiting[one.first] = one
            self._calls |= {one.first + i: one for i in range(len(places))}
        self._outgoing.put(pickle.dumps((one.first, places, payload)))

    def collect(self) -> dict[Hashable, Scored | Failure]:
        """What became of the responses that were submitted since the last time, in their order.

        It waits for all of them; with `reward.on_error=fail`, once one fails, only for those that were submitted
        before it, so that the first failure is the same however long the others take.

        Raises:
            RewardError: the pool's processes ended, or the functions cannot be imported there.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._is_busy())
            if self._is_busy():
                raise RewardError(self._ended)
            done = sorted(self._done, key=lambda one: one.first)
            self._waiting, self._calls, self._done, self._first_failure = {}, {}, [], math.inf
        return {one.key: one.result(self._parts) for one in done}

    def close(self) -> None:
        """End all processes, whatever they are doing; returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # its workers die with it
            self._process.kill()
            self._process.wait()

    def _is_busy(self) -> bool:
        return bool(self._waiting) and next(iter(self._waiting)) <= self._first_failure

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._connection.sendall(framed(message))

    def _receive(self) -> None:
        buffer = bytearray()
        try:
            while read := self._connection.recv(1 << 16):
                buffer += read
                for message in take_messages(buffer):
                    self._take(json.loads(message))
        except OSError:
            pass
        with self._changed:
            self._ended = self._ended or "the process that leads the reward workers has ended (out of memory?)"
            self._changed.notify_all()

    def _take(self, message: Any) -> None:
        with self._changed:
            if isinstance(message, dict):
                self._ended = message["ended"]
                self._changed.notify_all()
                return
            number, judged, seconds, tries = message
            one = self._calls.pop(number, None)
            if one is None:  # it was submitted before a collection that did not wait for it
                return
            one.found[one.places[number - one.first]] = Judged(**judged), seconds, tries
            if judged["score"] is None and self._fails:
                self._first_failure = min(self._first_failure, one.first)
            if len(one.found) == len(one.places):
                self._done.append(self._waiting.pop(one.first))
            if not self._is_busy():
                self._changed.notify_all()

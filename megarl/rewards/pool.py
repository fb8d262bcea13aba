"""Runs processes that score responses while others are still being generated."""

from __future__ import annotations

import math
import pickle
import subprocess
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.config.reward import RewardConfig
from megarl.rewards.parts import Part, combined
from megarl.rewards.results import CallResult, Failure, Response, RewardError, Scored
from megarl.rewards.supervisor import START_SECONDS, Setup
from megarl.rewards.worker import Function
from megarl.workers.threaded import ThreadedInterpreter

if TYPE_CHECKING:
    from megarl.types import Prompt

_ENDED = "the process that leads the reward workers has ended (out of memory?)"
SILENCE = 30.0
"""Seconds over `reward.timeout` without a sign of life, of which there is one a second, until the leader is ended."""
_LOOKS = 10


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """Holds a response that is being scored.

    Attributes:
        first: number of its first call; responses that were submitted later have higher ones.
        places: places of the parts that apply to it.
        message: the message that it was submitted with.
        again: whether it was given to a second leader, when the first ended.
        results: of each call by its part's place, with its seconds and tries.
    """

    first: int
    key: Hashable
    text: str
    row: str
    places: tuple[int, ...]
    message: bytes
    again: bool = False
    results: dict[int, tuple[CallResult, float, int]] = field(default_factory=dict)

    def result(self, parts: Sequence[Part]) -> Scored | Failure:
        results, seconds, tries = zip(*(self.results[place] for place in self.places), strict=True)
        return combined(
            [parts[place] for place in self.places],
            results,
            text=self.text,
            row=self.row,
            seconds=seconds,
            retried=sum(tries) + self.again,
        )


class RewardPool:
    """Scores responses in worker processes; they start when it is constructed, and end with it or with this process.

    A call that takes longer than `reward.timeout` is ended from outside, with its worker and whatever that started,
    and another worker takes its place; what a function prints is thrown away. Where the process that leads the workers
    ends, or gives no sign of life, another one gets what was waiting, once.
    """

    def __init__(self, parts: Sequence[Part], settings: RewardConfig, workers: int) -> None:
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
        self._setup = Setup(
            functions=tuple(Function(name=part.reward.name, args=part.args, kind=part.kind) for part in parts),
            workers=workers,
            timeout=settings.timeout,
            retries=settings.retries if settings.on_error == "retry" else 0,
            batch_size=settings.batch_size or 1,
            concurrency=settings.concurrency,
        )
        self._leader = self._start_leader()

    def submit(self, key: Hashable, response: Response, prompt: Prompt, source: str = "") -> None:
        """Have a response scored, under a key of its own, by the parts that apply to its data source."""
        assert not self._closed, "a closed pool scores nothing"
        places = tuple(i for i, part in enumerate(self._parts) if part.applies_to(source))
        assert places, "checked before the run: some part applies to every row"
        payload = pickle.dumps((response, dict(prompt.row)))
        row = prompt.source or f"row {prompt.index}"
        if self._leader.gone and not self._ended:
            self._lead_anew()
        with self._changed:
            message = pickle.dumps((self._numbers, places, payload))
            first = self._numbers
            waiting = _Waiting(first=first, key=key, text=response.text, row=row, places=places, message=message)
            self._numbers += len(places)
            self._waiting[first] = waiting
            self._calls |= {first + i: waiting for i in range(len(places))}
        self._leader.post(message)

    def collect(self) -> dict[Hashable, Scored | Failure]:
        """Return the results of the responses that were submitted since the last time, in their order.

        It waits for all of them; with `reward.on_error=fail`, once one fails, only for those that were submitted
        before it, so that the first failure is the same however long the others take.

        Raises:
            RewardError: the pool's processes ended, or the functions cannot be imported there.
        """
        while self._needs_another_leader():
            self._lead_anew()
        with self._changed:
            if self._is_busy():
                raise RewardError(self._ended, everywhere=False)
            done = sorted(self._done, key=lambda response: response.first)
            self._waiting, self._calls, self._done, self._first_failure = {}, {}, [], math.inf
        return {response.key: response.result(self._parts) for response in done}

    def close(self) -> None:
        """End all processes, whatever they are doing; returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        with self._changed:  # who waits for results in another thread goes on
            self._ended = self._ended or "the reward workers are closed"
            self._changed.notify_all()
        self._leader.close()

    def _start_leader(self) -> ThreadedInterpreter:
        leader = ThreadedInterpreter("megarl.rewards.supervisor:main", self._take, output=subprocess.DEVNULL)
        leader.post(pickle.dumps(self._setup))
        return leader

    def _needs_another_leader(self) -> bool:
        """Wait for the results; return whether the leader has ended before they were there."""
        silent, heard, leader = 0, -1, self._leader

        def over() -> bool:
            return bool(self._ended) or leader.gone or not self._is_busy()

        while True:
            seconds = self._setup.timeout + SILENCE if leader.heard else START_SECONDS
            with self._changed:
                if self._changed.wait_for(over, seconds / _LOOKS):
                    return leader.gone and not self._ended and self._is_busy()
            # looks are counted, and not seconds: after a stop of the whole job all of them have gone by at once
            silent, heard = (silent + 1 if leader.heard == heard else 0), leader.heard
            if silent == _LOOKS:
                leader.process.kill()

    def _lead_anew(self) -> None:
        """Give the responses that wait to another leader, unless that has been tried."""
        self._leader.close()
        with self._changed:
            if any(response.again for response in self._waiting.values()):
                self._ended = _ENDED
                return
            self._leader = self._start_leader()
            for response in self._waiting.values():
                response.again = True
                self._leader.post(response.message)

    def _is_busy(self) -> bool:
        return bool(self._waiting) and next(iter(self._waiting)) <= self._first_failure

    def _take(self, message: Any) -> None:
        with self._changed:
            if message is None or isinstance(message, dict):
                self._ended = self._ended or (message or {}).get("ended", "")
                self._changed.notify_all()
                return
            number, result, seconds, tries = message
            response = self._calls.pop(number, None)
            if response is None:  # it was submitted before a collection that did not wait for it
                return
            place = response.places[number - response.first]
            response.results[place] = CallResult(**result), seconds, tries
            if result["score"] is None and self._fails:
                self._first_failure = min(self._first_failure, response.first)
            if len(response.results) == len(response.places):
                self._done.append(self._waiting.pop(response.first))
            if not self._is_busy():
                self._changed.notify_all()

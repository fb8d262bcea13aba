"""Processes that score responses while others are still being generated."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.config.reward import RewardConfig
from megarl.rewards.judge import Failure, Judged, Response, RewardError, Scored
from megarl.rewards.leader import Leader
from megarl.rewards.parts import Part, combined
from megarl.rewards.supervisor import START_SECONDS, Setup
from megarl.rewards.worker import Task

if TYPE_CHECKING:
    from megarl.types import Prompt

_ENDED = "the process that leads the reward workers has ended (out of memory?)"
SILENCE = 30.0
"""Seconds over `reward.timeout` without a sign of life, of which there is one a second, until the leader is ended."""
_LOOKS = 10


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """A response that is being scored.

    Attributes:
        first: number of its first call; responses that were submitted later have higher ones.
        places: of the parts that apply to it.
        message: that it was submitted with.
        again: it was given to a second leader, when the first ended.
        found: what each call came to, with its seconds and tries, by place.
    """

    first: int
    key: Hashable
    text: str
    row: str
    places: tuple[int, ...]
    message: bytes
    again: bool = False
    found: dict[int, tuple[Judged, float, int]] = field(default_factory=dict)

    def result(self, parts: Sequence[Part]) -> Scored | Failure:
        found = [self.found[place] for place in self.places]
        return combined(
            [parts[place] for place in self.places],
            [judged for judged, _, _ in found],
            text=self.text,
            row=self.row,
            seconds=tuple(seconds for _, seconds, _ in found),
            retried=sum(tries for _, _, tries in found) + self.again,
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
            tasks=tuple(Task(name=part.reward.name, args=part.args, kind=part.kind) for part in parts),
            workers=workers,
            timeout=settings.timeout,
            retries=settings.retries if settings.on_error == "retry" else 0,
            batch_size=settings.batch_size or 1,
            concurrency=settings.concurrency,
        )
        self._leader = Leader(self._setup, self._take)

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
            one = _Waiting(first=self._numbers, key=key, text=response.text, row=row, places=places, message=message)
            self._numbers += len(places)
            self._waiting[one.first] = one
            self._calls |= {one.first + i: one for i in range(len(places))}
        self._leader.send(message)

    def collect(self) -> dict[Hashable, Scored | Failure]:
        """What became of the responses that were submitted since the last time, in their order.

        It waits for all of them; with `reward.on_error=fail`, once one fails, only for those that were submitted
        before it, so that the first failure is the same however long the others take.

        Raises:
            RewardError: the pool's processes ended, or the functions cannot be imported there.
        """
        while self._lasts():
            self._lead_anew()
        with self._changed:
            if self._is_busy():
                raise RewardError(self._ended, everywhere=False)
            done = sorted(self._done, key=lambda one: one.first)
            self._waiting, self._calls, self._done, self._first_failure = {}, {}, [], math.inf
        return {one.key: one.result(self._parts) for one in done}

    def close(self) -> None:
        """End all processes, whatever they are doing; returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        self._leader.close()

    def _lasts(self) -> bool:
        """Wait for what was submitted; whether another leader has to go on with it."""
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
        """Give what waits to another leader, unless that has been tried."""
        self._leader.close()
        with self._changed:
            if any(one.again for one in self._waiting.values()):
                self._ended = _ENDED
                return
            self._leader = Leader(self._setup, self._take)
            for one in self._waiting.values():
                one.again = True
                self._leader.send(one.message)

    def _is_busy(self) -> bool:
        return bool(self._waiting) and next(iter(self._waiting)) <= self._first_failure

    def _take(self, message: Any) -> None:
        with self._changed:
            if message is None or isinstance(message, dict):
                self._ended = self._ended or (message or {}).get("ended", "")
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

"""Scores by a function that only this process has: a closure that a program gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.reward import RewardConfig
from megarl.rewards.call import Caller
from megarl.rewards.deadline import DeadlinePassed, call_within
from megarl.rewards.judge import (
    Failure,
    Judged,
    NoScore,
    Response,
    Scored,
    judged,
    judged_error,
    too_late,
    users_frames,
)
from megarl.rewards.parts import Part, combined
from megarl.rewards.supervisor import FIRST_PAUSE, LONGEST_PAUSE

if TYPE_CHECKING:
    from megarl.types import Prompt

_USERS = (Exception, SystemExit, asyncio.CancelledError)


class InRank:
    """Takes the place of a `RewardPool`: `collect` calls the function, one response after another."""

    def __init__(self, part: Part, settings: RewardConfig) -> None:
        self._part, self._settings = part, settings
        self._caller = Caller(part.reward, part.args)
        self._submitted: list[tuple[Hashable, Response, Prompt]] = []

    def submit(self, key: Hashable, response: Response, prompt: Prompt, source: str = "") -> None:
        self._submitted.append((key, response, prompt))

    def collect(self) -> dict[Hashable, Scored | Failure]:
        """As that of a `RewardPool`; with `reward.on_error=fail` the first failure is the last that is returned."""
        submitted, self._submitted = self._submitted, []
        size, results = self._settings.batch_size or 1, dict[Hashable, Scored | Failure]()
        for i in range(0, len(submitted), size):
            those = submitted[i : i + size]
            for (key, _, _), result in zip(those, self._results(those), strict=True):
                results[key] = result
                if isinstance(result, Failure) and not result.left_out and self._settings.on_error == "fail":
                    return results
        return results

    def close(self) -> None:
        pass

    def _results(self, those: Sequence[tuple[Hashable, Response, Prompt]]) -> list[Scored | Failure]:
        found, seconds = self._call(those)
        results = []
        for (key, response, prompt), one in zip(those, found, strict=True):
            tries = 0
            while one.score is None and self._settings.on_error == "retry" and tries < self._settings.retries:
                time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2**tries))
                tries += 1
                (one,), seconds = self._call([(key, response, prompt)])
            row = prompt.source or f"row {prompt.index}"
            took = (seconds,)
            results.append(combined([self._part], [one], text=response.text, row=row, seconds=took, retried=tries))
        return results

    def _call(self, those: Sequence[tuple[Hashable, Response, Prompt]]) -> tuple[list[Judged], float]:
        start, timeout = time.monotonic(), self._settings.timeout
        responses, rows = [response for _, response, _ in those], [prompt.row for _, _, prompt in those]
        try:
            if self._part.kind == "batch":
                found = call_within(timeout, lambda: self._many(responses, rows))
            else:
                value = call_within(timeout, lambda: self._one(responses[0], rows[0]))
                found = [judged(lambda: value)]
        except DeadlinePassed as e:
            found = [too_late(timeout, users_frames(e.__traceback__))] * len(those)
        except _USERS as e:
            found = [judged_error(e)] * len(those)
        return found, time.monotonic() - start

    def _many(self, responses: list[Response], rows: list[Any]) -> list[Judged]:
        try:
            return self._caller.many(responses, rows)
        except NoScore as e:
            return [Judged(wrong=str(e))] * len(responses)

    def _one(self, response: Response, row: Any) -> Any:
        value = self._caller.one(response, row)
        return asyncio.run(value) if self._part.kind == "async" else value

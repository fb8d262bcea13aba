"""Scores by a function that only this process has: a closure that a program gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from megarl.config.reward import RewardConfig
from megarl.own_code import torch_as_before
from megarl.rewards.call import Caller
from megarl.rewards.parts import Part, combined
from megarl.rewards.results import (
    FRAMEWORK,
    CallResult,
    Failure,
    Response,
    Scored,
    result_of_error,
    result_of_value,
    too_late,
)
from megarl.rewards.supervisor import pause_before_retry
from megarl.workers.deadline import DeadlinePassed, call_within
from megarl.workers.frames import frames_of

if TYPE_CHECKING:
    from megarl.types import Prompt

_USERS = (Exception, SystemExit, asyncio.CancelledError)
_Submitted = tuple[Hashable, Response, "Prompt"]


class InRank:
    """Takes the place of a `RewardPool`: `collect` calls the function, one response after another."""

    def __init__(self, part: Part, settings: RewardConfig) -> None:
        self._part, self._settings = part, settings
        self._caller = Caller(part.reward, part.args)
        self._submitted: list[_Submitted] = []

    def submit(self, key: Hashable, response: Response, prompt: Prompt, source: str = "") -> None:
        self._submitted.append((key, response, prompt))

    def collect(self) -> dict[Hashable, Scored | Failure]:
        """Return results as a `RewardPool` does; with `reward.on_error=fail` the first failure is the last result."""
        submitted, self._submitted = self._submitted, []
        size, results = self._settings.batch_size or 1, dict[Hashable, Scored | Failure]()
        for i in range(0, len(submitted), size):
            batch = submitted[i : i + size]
            for (key, _, _), result in zip(batch, self._results(batch), strict=True):
                results[key] = result
                if isinstance(result, Failure) and not result.left_out and self._settings.on_error == "fail":
                    return results
        return results

    def close(self) -> None:
        pass

    def _results(self, batch: Sequence[_Submitted]) -> list[Scored | Failure]:
        first_results, seconds = self._call(batch)
        results = []
        for submitted, result in zip(batch, first_results, strict=True):
            tries = 0
            while result.score is None and self._settings.on_error == "retry" and tries < self._settings.retries:
                time.sleep(pause_before_retry(tries))
                tries += 1
                (result,), seconds = self._call([submitted])
            _, response, prompt = submitted
            row = prompt.source or f"row {prompt.index}"
            took = (seconds,)
            results.append(combined([self._part], [result], text=response.text, row=row, seconds=took, retried=tries))
        return results

    def _call(self, batch: Sequence[_Submitted]) -> tuple[list[CallResult], float]:
        start, timeout = time.monotonic(), self._settings.timeout
        responses, rows = [response for _, response, _ in batch], [deepcopy(prompt.row) for _, _, prompt in batch]
        try:
            with torch_as_before():
                if self._part.kind == "batch":
                    results = call_within(timeout, lambda: self._caller.many(responses, rows))
                else:
                    value = call_within(timeout, lambda: self._one(responses[0], rows[0]))
                    results = [result_of_value(value)]
        except DeadlinePassed as e:
            results = [too_late(timeout, frames_of(e.__traceback__, FRAMEWORK))] * len(batch)
        except _USERS as e:
            results = [result_of_error(e)] * len(batch)
        return results, time.monotonic() - start

    def _one(self, response: Response, row: Any) -> Any:
        value = self._caller.one(response, row)
        return asyncio.run(value) if self._part.kind == "async" else value

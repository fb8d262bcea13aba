"""Calls reward functions in a forked process, whatever they do to it. Torch-free, but for what the functions import."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from megarl.rewards.call import Caller
from megarl.rewards.registry import load_reward
from megarl.rewards.results import (
    FRAMEWORK,
    CallResult,
    NoScore,
    result_of,
    result_of_error,
    result_of_value,
    too_late,
)
from megarl.workers.channel import Channel
from megarl.workers.deadline import ends_within
from megarl.workers.frames import frames_of_coroutine

Calls = list[tuple[int, int, bytes]]
"""The calls that are made at a time: (number, place of the function, pickled response and row) each."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """Describes a reward function, as a worker finds it.

    Attributes:
        name: the value of `reward.name`, or of a part's name.
        args: its configured arguments.
        kind: "plain", "batch" or "async".
    """

    name: str
    args: Mapping[str, Any]
    kind: str


def serve(channel: Channel, functions: Sequence[Function], timeout: float) -> NoReturn:
    """Call what arrives until the supervisor is gone.

    Messages are pickled `Calls`. The answers are JSON: {"ready": true}, {"broken": why}, or {"results": [[number,
    result], ...], "together": whether the failure is that of one call with all of them}.
    """
    _Worker(channel, functions, timeout).run()


class _Worker:
    def __init__(self, channel: Channel, functions: Sequence[Function], timeout: float) -> None:
        self._channel, self._functions, self._timeout, self._pid = channel, functions, timeout, os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._inbox: deque[Calls] = deque()

    def run(self) -> NoReturn:
        try:
            rewards = [load_reward(function.name) for function in self._functions]
            for reward in rewards:
                if reward.prepare is not None:
                    reward.prepare()
            self._callers = [Caller(reward, f.args) for reward, f in zip(rewards, self._functions, strict=True)]
        except BaseException:
            self._answer({"broken": traceback.format_exc()[-4000:]})
            os._exit(1)
        self._answer({"ready": True})
        while True:
            if not self._inbox:
                self._channel.wait()
                self._receive()
            elif self._is_async(self._inbox[0]):
                self._serve_async()
            else:
                self._call(self._inbox.popleft())

    def _is_async(self, calls: Calls) -> bool:
        return self._functions[calls[0][1]].kind == "async"

    def _receive(self) -> None:
        try:
            self._inbox += [pickle.loads(message) for message in self._channel.receive()]
        except EOFError:  # the supervisor is gone, or a function has closed what it did not open
            os._exit(1)

    def _call(self, calls: Calls) -> None:
        """Make one call of a plain function, or one of a function of lists."""
        place = calls[0][1]
        caller, together = self._callers[place], False
        with ends_within(self._timeout):
            if self._functions[place].kind == "batch":
                try:
                    results = caller.many(*zip(*(pickle.loads(payload) for _, _, payload in calls), strict=True))
                except BaseException as e:
                    results, together = [result_of_error(e)] * len(calls), not isinstance(e, NoScore)
            else:
                results = [result_of(lambda: caller.one(*pickle.loads(calls[0][2])), BaseException)]
        self._answer_calls([number for number, _, _ in calls], results, together=together)

    def _serve_async(self) -> None:
        """Run coroutines, and those that arrive meanwhile, until none is left."""
        if self._loop is None:  # one for good: clients keep their connections in it
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._until_idle(self._loop))

    async def _until_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        idle = asyncio.Event()

        def begin() -> None:
            while self._inbox and self._is_async(self._inbox[0]):  # a plain call comes when the last of these is over
                for number, place, payload in self._inbox.popleft():
                    call = loop.create_task(self._one(number, place, payload))
                    self._running.add(call)
                    call.add_done_callback(end)

        def end(call: asyncio.Task[None]) -> None:
            self._running.discard(call)
            rest()

        def arrived() -> None:
            self._receive()
            begin()
            rest()

        def rest() -> None:
            if not self._running and self._channel.is_between_messages:
                idle.set()

        begin()
        loop.add_reader(self._channel.fileno(), arrived)
        try:
            while self._running or not self._channel.is_between_messages:
                idle.clear()
                await idle.wait()
        finally:
            loop.remove_reader(self._channel.fileno())

    async def _one(self, number: int, place: int, payload: bytes) -> None:
        """Run one coroutine up to its deadline; it is left where it is if it does not let itself be cancelled."""

        async def scored() -> CallResult:
            try:
                return result_of_value(await self._callers[place].one(*pickle.loads(payload)))
            except BaseException as e:
                return result_of_error(e)

        call = asyncio.ensure_future(scored())
        done, _ = await asyncio.wait({call}, timeout=self._timeout)
        if done:
            result = call.result()
        else:
            result = too_late(self._timeout, frames_of_coroutine(call.get_coro(), FRAMEWORK))
            call.cancel()
        self._answer_calls([number], [result])

    def _answer_calls(self, numbers: Sequence[int], results: Sequence[CallResult], *, together: bool = False) -> None:
        if os.getpid() != self._pid:  # a child that the function forked has come back out of it
            os._exit(0)
        pairs = [[number, asdict(result)] for number, result in zip(numbers, results, strict=True)]
        self._answer({"results": pairs, "together": together})

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._channel.send(json.dumps(answer).encode())
        self._channel.drain()

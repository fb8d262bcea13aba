"""A process that calls reward functions, whatever they do to it. Torch-free, but for what the functions import."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NoReturn

from megarl.processes import STOP_SIGNALS, adopt_orphans, die_with_parent
from megarl.rewards.call import Caller
from megarl.rewards.deadline import ends_within
from megarl.rewards.judge import (
    Judged,
    NoScore,
    judged,
    judged_error,
    judged_value,
    live_frames,
    too_late,
)
from megarl.rewards.registry import load_reward
from megarl.workers.channel import Channel

DUMP_SIGNAL = signal.SIGRTMAX - 1
"""Makes a worker write where its Python code is; a number that nobody else uses."""


Calls = list[tuple[int, int, bytes]]
"""What is called at a time: (number, task, pickled response and row) each."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function, as a worker finds it.

    Attributes:
        name: the value of `reward.name`, or of a part's name.
        args: its configured arguments.
        kind: "plain", "batch" or "async".
    """

    name: str
    args: Mapping[str, Any]
    kind: str


def serve(channel: Channel, dump: int, tasks: Sequence[Task], timeout: float, supervisor: int) -> NoReturn:
    """Call what arrives until the supervisor is gone.

    Messages are pickled `Calls`. The answers are JSON: {"ready": true}, {"broken": why}, or {"results": [[number,
    judged], ...], "together": whether the failure is that of one call with all of them}.

    Args:
        dump: a file's descriptor, where the frames go at the end.
    """
    die_with_parent(supervisor)
    adopt_orphans()  # what a function left behind is found below this process, and ends with it
    _yield_to_the_ranks()
    _outlive_stop_signals()
    faulthandler.enable(file=dump, all_threads=False)
    faulthandler.register(DUMP_SIGNAL, file=dump, all_threads=False, chain=False)
    _Worker(channel, tasks, timeout).run()


class _Worker:
    def __init__(self, channel: Channel, tasks: Sequence[Task], timeout: float) -> None:
        self._channel, self._tasks, self._timeout, self._pid = channel, tasks, timeout, os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._inbox: deque[Calls] = deque()

    def run(self) -> NoReturn:
        try:
            rewards = [load_reward(task.name) for task in self._tasks]
            for reward in rewards:
                if reward.prepare is not None:
                    reward.prepare()
            self._callers = [Caller(reward, task.args) for reward, task in zip(rewards, self._tasks, strict=True)]
        except BaseException:
            self._answer({"broken": traceback.format_exc()[-4000:]})
            self._channel.drain()
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
        return self._tasks[calls[0][1]].kind == "async"

    def _receive(self) -> None:
        try:
            self._inbox += [pickle.loads(message) for message in self._channel.receive()]
        except EOFError:  # the supervisor is gone, or a function has closed what it did not open
            os._exit(1)

    def _call(self, calls: Calls) -> None:
        """Calls of one plain function, or one call of a function of lists."""
        numbers, task = [number for number, _, _ in calls], calls[0][1]
        caller, together = self._callers[task], False
        with ends_within(self._timeout):
            if self._tasks[task].kind == "batch":
                try:
                    found = caller.many(*zip(*(pickle.loads(payload) for _, _, payload in calls), strict=True))
                except NoScore as e:
                    found = [Judged(wrong=str(e))] * len(calls)
                except BaseException as e:
                    found, together = [judged_error(e)] * len(calls), True
            else:
                found = [judged(lambda: caller.one(*pickle.loads(calls[0][2])), BaseException)]
        if os.getpid() != self._pid:  # a child that the function forked has come back out of it
            os._exit(0)
        results = [[number, asdict(one)] for number, one in zip(numbers, found, strict=True)]
        self._answer({"results": results, "together": together})
        self._channel.drain()

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
                for number, task, payload in self._inbox.popleft():
                    call = loop.create_task(self._one(number, task, payload))
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

    async def _one(self, number: int, task: int, payload: bytes) -> None:
        """One coroutine with its deadline; it is left where it is if it does not let itself be cancelled."""

        async def scored() -> Judged:
            try:
                return judged_value(await self._callers[task].one(*pickle.loads(payload)))
            except BaseException as e:
                return judged_error(e)

        call = asyncio.ensure_future(scored())
        done, _ = await asyncio.wait({call}, timeout=self._timeout)
        if done:
            found = call.result()
        else:
            found = too_late(self._timeout, live_frames(call.get_coro()))
            call.cancel()
        if os.getpid() != self._pid:
            os._exit(0)
        self._answer({"results": [[number, asdict(found)]], "together": False})
        self._channel.drain()

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._channel.send(json.dumps(answer).encode())


def _yield_to_the_ranks() -> None:
    """Decoding comes first where cores are few; and where memory is, a rank must not be what the kernel ends."""
    os.nice(5)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
        f.write("1000")


def _outlive_stop_signals() -> None:
    """What stops a run is sent to all its processes, and the ranks may need scores until they have saved.

    The signals are not ignored: programs that a function starts would inherit that, and could not be terminated.
    """
    pid = os.getpid()

    def stay(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a forked child
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in STOP_SIGNALS:
        signal.signal(signum, stay)

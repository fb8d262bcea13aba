"""Feeds reward workers, ends those that are late, and starts others: a process between a rank and its workers.

It runs no user's code, so it always answers. Torch-free.
"""

from __future__ import annotations

import heapq
import json
import pickle
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megarl.processes import end_with_descendants, ending
from megarl.rewards.results import FRAMEWORK, too_late
from megarl.rewards.worker import Function, serve
from megarl.workers.channel import Channel
from megarl.workers.forked import ForkedWorker, ForkedWorkers
from megarl.workers.frames import frames_of_dump

START_SECONDS = 600.0
"""That importing the functions may take."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_BEAT = 1.0  # seconds between two signs of life
_FAILED_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds the functions that a rank has called by workers, and how.

    Attributes:
        workers: how many processes call functions.
        timeout: seconds of a call.
        retries: further tries of a response that fails.
        batch_size: responses of a call with lists at most.
        concurrency: coroutines of a worker at most.
    """

    functions: tuple[Function, ...]
    workers: int
    timeout: float
    retries: int
    batch_size: int
    concurrency: int


def pause_before_retry(tries: int) -> float:
    """Compute the seconds before the next try, which double from try to try: 1 after the first one, at most 60."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tries)


@dataclass(eq=False, kw_only=True)
class _Call:
    """Holds a response that a function is to score.

    Attributes:
        function: its place in `Setup.functions`.
        tries: failed tries.
        alone: whether it was in a call, or beside others, that ended badly: whose fault that was is not known.
        killed: whether somebody else has killed its worker, which need not be its fault.
    """

    number: int
    function: int
    payload: bytes
    tries: int = 0
    alone: bool = False
    killed: bool = False
    started: float = 0.0

    def __lt__(self, other: _Call) -> bool:
        return self.number < other.number


@dataclass(eq=False, kw_only=True)
class _Worker(ForkedWorker):
    """Holds the state of a reward worker.

    Attributes:
        ready: whether it has imported the functions.
        shared: whether it holds coroutines, and takes more.
        calls: what it has to do, by number.
    """

    ready: bool = False
    shared: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)


class Supervisor(ForkedWorkers[_Worker]):
    """Hands the calls of a rank to workers, and their results to the rank."""

    def __init__(self, rank: Channel, setup: Setup) -> None:
        super().__init__(rank)
        self._rank, self._setup = rank, setup
        self._exclusive: list[_Call] = []  # heaps: the oldest response first, whatever happened to it before
        self._shared: list[_Call] = []
        self._failed_starts = 0
        asyncs = sum(function.kind == "async" for function in setup.functions)
        mixed = 0 < asyncs < len(setup.functions)
        self._most_shared = max(1, setup.workers // 2) if mixed else setup.workers
        self._margin = min(5.0, 1.0 + setup.timeout)  # a coroutine's deadline is its worker's to keep
        for _ in range(setup.workers):
            self._start()
        self._beat()

    # ------------------------------------------------------------------------------------------------- the rank

    def accept(self, message: bytes) -> None:
        """Put a response to score into the queue: (number of its first call, places of functions, payload)."""
        number, functions, payload = pickle.loads(message)
        for i, function in enumerate(functions):
            self._queue(_Call(number=number + i, function=function, payload=payload))

    def _beat(self) -> None:
        """Show the rank that this process runs: it may be stopped, or have lost its memory to swapping."""
        self._rank.send(b"{}")
        self.after(_BEAT, self._beat)

    def _report(self, call: _Call, result: dict[str, Any]) -> None:
        call.payload = b""  # its deadline is still among the events
        seconds = time.monotonic() - call.started
        self._rank.send(json.dumps([call.number, result, seconds, call.tries + call.killed]).encode())

    # ------------------------------------------------------------------------------------------------- the queue

    def _queue(self, call: _Call) -> None:
        shared = self._setup.functions[call.function].kind == "async" and not call.alone
        heapq.heappush(self._shared if shared else self._exclusive, call)

    def hand_out(self) -> None:
        """Hand out the calls that wait, the oldest first, as far as workers are free."""
        if not (self._exclusive or self._shared):
            return
        idle = [worker for worker in self.workers.values() if worker.ready and not worker.calls and not worker.late]
        single = self._setup.workers == 1  # which would never come to one of the queues, without their order
        while self._exclusive or self._shared:
            shared_first = bool(self._shared) and not (self._exclusive and self._exclusive[0] < self._shared[0])
            if shared_first and (target := self._place_for_shared(idle)) is not None:
                self._hand(target, [heapq.heappop(self._shared)], shared=True)
            elif self._exclusive and idle and not (single and shared_first):
                self._hand(idle.pop(0), self._next_calls(1 + len(idle)), shared=False)
            elif self._shared and not single and (target := self._place_for_shared(idle)) is not None:
                self._hand(target, [heapq.heappop(self._shared)], shared=True)
            else:
                break

    def _place_for_shared(self, idle: list[_Worker]) -> _Worker | None:
        """Return the worker that a coroutine goes to, taken out of the idle ones if it is one."""
        holders = [worker for worker in self.workers.values() if worker.shared and worker.calls and not worker.late]
        if idle and len(holders) < self._most_shared:
            return idle.pop(0)
        free = [worker for worker in holders if len(worker.calls) < self._setup.concurrency]
        return min(free, key=lambda worker: len(worker.calls)) if free else None

    def _next_calls(self, idle: int) -> list[_Call]:
        """Take the calls that are made together: several of a function of lists, spread over the idle workers."""
        calls = [heapq.heappop(self._exclusive)]
        if self._setup.functions[calls[0].function].kind == "batch" and not calls[0].alone:
            size = min(self._setup.batch_size, -(-(1 + len(self._exclusive)) // idle))
            while len(calls) < size and self._exclusive and not self._exclusive[0].alone:
                calls.append(heapq.heappop(self._exclusive))
        return calls

    def _hand(self, worker: _Worker, calls: list[_Call], *, shared: bool) -> None:
        now = time.monotonic()
        worker.shared = shared
        for call in calls:
            call.started = now
            worker.calls[call.number] = call
        worker.channel.send(pickle.dumps([(call.number, call.function, call.payload) for call in calls]))
        is_async = self._setup.functions[calls[0].function].kind == "async"
        self.after(
            self._setup.timeout + (self._margin if is_async else 0.0), lambda: self._deadline(worker, calls[0], now)
        )

    def _deadline(self, worker: _Worker, call: _Call, started: float) -> None:
        if worker.calls.get(call.number) is call and call.started == started and not worker.late:
            self.end_late(worker)

    # ----------------------------------------------------------------------------------------------- the results

    def answered(self, worker: _Worker, message: bytes) -> None:
        try:
            answer = json.loads(message)
            results = answer.get("results", ())
        except ValueError:
            self.kill(worker, "wrote into its connection")
            return
        if "ready" in answer:
            worker.ready, self._failed_starts = True, 0
        elif "broken" in answer:
            self._give_up(f"a reward worker cannot start:\n{answer['broken']}")
        for number, result in results:
            call = worker.calls.pop(number, None)
            if call is None:
                continue
            if result["score"] is not None:
                self._report(call, result)
            elif answer["together"] and len(results) > 1:
                self._try_alone(call)
            else:
                self._failed(call, result)

    def _failed(self, call: _Call, result: dict[str, Any]) -> None:
        if call.tries == self._setup.retries:
            self._report(call, result)
            return
        self.after(pause_before_retry(call.tries), lambda: self._queue(call))
        call.tries += 1

    def _try_alone(self, call: _Call) -> None:
        """Try again, alone: others shared a call or a process with it, and one of them ended it."""
        call.alone = True
        self._queue(call)

    # ----------------------------------------------------------------------------------------------- the workers

    def _start(self) -> None:
        worker = self.start(_Worker, lambda channel: serve(channel, self._setup.functions, self._setup.timeout))
        self.after(START_SECONDS, lambda: None if worker.ready else self.kill(worker))

    def ended(self, worker: _Worker, code: int, dump: str) -> None:
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == _FAILED_STARTS:
                self._give_up(f"reward workers end before they are ready: {_ending(code)}")
        killed = -code == signal.SIGKILL and not (worker.late or worker.why)  # by nobody here: for memory, mostly
        for call in worker.calls.values():
            if len(worker.calls) > 1:
                self._try_alone(call)
            elif killed and not call.killed:
                call.killed = True
                self._try_alone(call)
            else:
                late = too_late(self._setup.timeout).wrong
                wrong = late if worker.late else f"ended its process: {worker.why or _ending(code)}"
                frames = frames_of_dump(dump, FRAMEWORK)
                self._failed(call, {"score": None, "metrics": {}, "wrong": wrong, "frames": frames})
        self._start()

    def _give_up(self, why: str) -> NoReturn:
        _say_last(self._rank, why)
        end_with_descendants()


def _say_last(rank: Channel, why: str) -> None:
    """Tell the rank why no result follows."""
    rank.send(json.dumps({"ended": why}).encode())
    rank.drain()


def _ending(code: int) -> str:
    return f"{ending(code)}{' (out of memory?)' * (-code == signal.SIGKILL)}"


def main(connection: socket.socket) -> None:
    """Serve the rank at the other end of a connection; the first message is a pickled `Setup`."""
    rank = Channel(connection)
    try:
        while not (messages := rank.receive()):
            rank.wait()
        supervisor = Supervisor(rank, pickle.loads(messages[0]))
        for message in messages[1:]:
            supervisor.accept(message)
        supervisor.run()
    except EOFError:
        pass
    except BaseException:
        _say_last(rank, f"the process that leads the reward workers failed:\n{traceback.format_exc()}")

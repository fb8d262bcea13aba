"""Feeds workers, ends those that are late, and starts others: a process between a rank and its workers. Torch-free.

It runs no user's code, so it always answers; workers are forked from it, which is cheap, and they inherit nothing of
the rank's: no GPU, no group, no thread. What workers leave behind becomes its child and ends with them.
"""

from __future__ import annotations

import heapq
import json
import os
import pickle
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import FrameType
from typing import Any, NoReturn

from megarl.processes import (
    STOP_SIGNALS,
    adopt_orphans,
    children,
    end_with_descendants,
    kill_tree,
    tell_of_parents_end,
)
from megarl.rewards import worker as workers
from megarl.rewards.judge import dumped_frames, too_late
from megarl.rewards.worker import DUMP_SIGNAL, Task
from megarl.workers.channel import Channel

START_SECONDS = 600.0
"""That importing the functions may take."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the first further try, which double up to the second."""

_LONGEST_ANSWER = 1 << 20
_DUMP_SECONDS = 0.1  # between asking for the frames and SIGKILL
_BEAT = 1.0  # seconds between two signs of life
_EXIT_SECONDS = 1.0  # between the end of a connection and that of its process
_FAILED_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a rank asks for.

    Attributes:
        workers: how many processes call functions.
        timeout: seconds of a call.
        retries: further tries of a response that fails.
        batch_size: responses of a call with lists at most.
        concurrency: coroutines of a worker at most.
    """

    tasks: tuple[Task, ...]
    workers: int
    timeout: float
    retries: int
    batch_size: int
    concurrency: int


@dataclass(eq=False, kw_only=True)
class _Job:
    number: int
    task: int
    payload: bytes
    tries: int = 0
    alone: bool = False  # it was in a call, or beside others, that ended badly: whose fault that was is not known
    killed: bool = False  # somebody else has killed its worker, which need not be its fault
    started: float = 0.0

    def __lt__(self, other: _Job) -> bool:
        return self.number < other.number


@dataclass(eq=False, kw_only=True)
class _Worker:
    pid: int
    channel: Channel
    dump: int
    ready: bool = False
    shared: bool = False  # holds coroutines, and takes more
    late: bool = False  # is being ended
    connected: bool = True
    why: str = ""  # it is ended, if not for its deadline
    jobs: dict[int, _Job] = field(default_factory=dict)


class Supervisor:
    """The process's loop."""

    def __init__(self, rank: Channel, setup: Setup) -> None:
        self._rank, self._setup = rank, setup
        self._selector = selectors.DefaultSelector()
        self._selector.register(rank, selectors.EVENT_READ, self._from_rank)
        self._workers: dict[int, _Worker] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._exclusive: list[_Job] = []  # heaps: the oldest response first, whatever happened to it before
        self._shared: list[_Job] = []
        self._failed_starts = 0
        asyncs = sum(task.kind == "async" for task in setup.tasks)
        mixed = 0 < asyncs < len(setup.tasks)
        self._most_shared = max(1, setup.workers // 2) if mixed else setup.workers
        self._margin = min(5.0, 1.0 + setup.timeout)  # a coroutine's deadline is its worker's to keep

    def run(self) -> NoReturn:
        wake, wakes = socket.socketpair()
        wake.setblocking(False)
        wakes.setblocking(False)
        self._inherited = [wake, wakes]
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._reap(wake))
        for _ in range(self._setup.workers):
            self._start()
        self._beat()
        while True:
            now = time.monotonic()
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            self._assign()
            self._watch_writes()
            timeout = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            for key, _ in self._selector.select(timeout):
                key.data()

    # ------------------------------------------------------------------------------------------------- the rank

    def _from_rank(self) -> None:
        self._rank.flush()
        try:
            messages = self._rank.receive()
        except EOFError:
            end_with_descendants()
        for message in messages:
            self.accept(message)

    def accept(self, message: bytes) -> None:
        """A response to score: (number of its first call, tasks, payload)."""
        number, tasks, payload = pickle.loads(message)
        for i, task in enumerate(tasks):
            self._queue(_Job(number=number + i, task=task, payload=payload))

    def _beat(self) -> None:
        """Show the rank that this process runs: it may be stopped, or have lost its memory to swapping."""
        self._rank.send(b"{}")
        self._at(time.monotonic() + _BEAT, self._beat)

    def _report(self, job: _Job, judged: dict[str, Any]) -> None:
        job.payload = b""  # its deadline is still among the events
        self._rank.send(
            json.dumps([job.number, judged, time.monotonic() - job.started, job.tries + job.killed]).encode()
        )

    def _watch_writes(self) -> None:
        """Wake up when a side that has not taken everything takes more."""
        for channel in [self._rank, *(w.channel for w in self._workers.values() if w.connected)]:
            key = self._selector.get_key(channel)
            wanted = selectors.EVENT_READ | (0 if channel.flush() else selectors.EVENT_WRITE)
            if key.events != wanted:
                self._selector.modify(channel, wanted, key.data)

    # ------------------------------------------------------------------------------------------------- the queue

    def _queue(self, job: _Job) -> None:
        shared = self._setup.tasks[job.task].kind == "async" and not job.alone
        heapq.heappush(self._shared if shared else self._exclusive, job)

    def _assign(self) -> None:
        """Hand out what waits, the oldest first, as far as workers are free."""
        if not (self._exclusive or self._shared):
            return
        idle = [worker for worker in self._workers.values() if worker.ready and not worker.jobs and not worker.late]
        single = self._setup.workers == 1  # which would never come to one of the queues, without their order
        while self._exclusive or self._shared:
            shared_first = bool(self._shared) and not (self._exclusive and self._exclusive[0] < self._shared[0])
            if shared_first and (target := self._place_for_shared(idle)) is not None:
                self._hand(target, [heapq.heappop(self._shared)], shared=True)
            elif self._exclusive and idle and not (single and shared_first):
                self._hand(idle.pop(0), self._next_call(1 + len(idle)), shared=False)
            elif self._shared and not single and (target := self._place_for_shared(idle)) is not None:
                self._hand(target, [heapq.heappop(self._shared)], shared=True)
            else:
                break

    def _place_for_shared(self, idle: list[_Worker]) -> _Worker | None:
        """The worker that a coroutine goes to; taken out of the idle ones if it is one."""
        holders = [worker for worker in self._workers.values() if worker.shared and worker.jobs and not worker.late]
        if idle and len(holders) < self._most_shared:
            return idle.pop(0)
        free = [worker for worker in holders if len(worker.jobs) < self._setup.concurrency]
        return min(free, key=lambda worker: len(worker.jobs)) if free else None

    def _next_call(self, idle: int) -> list[_Job]:
        """The jobs of one call: several for a function of lists, spread over the idle workers."""
        first = heapq.heappop(self._exclusive)
        calls = [first]
        if self._setup.tasks[first.task].kind == "batch" and not first.alone:
            wanted = min(self._setup.batch_size, -(-(1 + len(self._exclusive)) // idle))
            while len(calls) < wanted and self._exclusive and not self._exclusive[0].alone:
                calls.append(heapq.heappop(self._exclusive))
        return calls

    def _hand(self, worker: _Worker, jobs: list[_Job], *, shared: bool) -> None:
        now = time.monotonic()
        worker.shared = shared
        of_async = self._setup.tasks[jobs[0].task].kind == "async"
        deadline = now + self._setup.timeout + (self._margin if of_async else 0.0)
        for job in jobs:
            job.started = now
            worker.jobs[job.number] = job
        worker.channel.send(pickle.dumps([(job.number, job.task, job.payload) for job in jobs]))
        self._at(deadline, lambda: self._deadline(worker, jobs[0], now))

    # ----------------------------------------------------------------------------------------------- the results

    def _from_worker(self, worker: _Worker) -> None:
        if self._workers.get(worker.pid) is not worker:  # its end was among the same events
            return
        worker.channel.flush()
        try:
            messages = worker.channel.receive()
        except EOFError:  # it ends, which SIGCHLD tells; or its function has closed the connection
            self._selector.unregister(worker.channel)
            worker.connected = False
            self._at(time.monotonic() + _EXIT_SECONDS, lambda: self._kill(worker, "closed its connection"))
            return
        for message in messages:
            self._answer(worker, message)

    def _answer(self, worker: _Worker, message: bytes) -> None:
        if worker.late:
            return
        try:
            answer = json.loads(message)
            results = answer.get("results", ())
        except ValueError:
            self._kill(worker, "wrote into its connection")
            return
        if "ready" in answer:
            worker.ready, self._failed_starts = True, 0
        elif "broken" in answer:
            self._give_up(f"a reward worker cannot start:\n{answer['broken']}")
        for number, judged in results:
            job = worker.jobs.pop(number, None)
            if job is None:
                continue
            if judged["score"] is not None:
                self._report(job, judged)
            elif answer["together"] and len(results) > 1:
                self._by_itself(job)
            else:
                self._failed(job, judged)

    def _failed(self, job: _Job, judged: dict[str, Any]) -> None:
        if job.tries == self._setup.retries:
            self._report(job, judged)
            return
        self._at(
            time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2**job.tries),
            lambda: self._queue(job),
        )
        job.tries += 1

    def _by_itself(self, job: _Job) -> None:
        """Try again, alone: others shared a call or a process with it, and one of them ended it."""
        job.alone = True
        self._queue(job)

    # ----------------------------------------------------------------------------------------------- the workers

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        dump, parent = os.memfd_create("frames"), os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._selector.close()
                self._rank.close()
                for connection in (ours, *self._inherited):
                    connection.close()
                for other in self._workers.values():
                    other.channel.close()
                    os.close(other.dump)
                workers.serve(Channel(theirs), dump, self._setup.tasks, self._setup.timeout, parent)
            finally:
                os._exit(1)
        theirs.close()
        worker = _Worker(pid=pid, channel=Channel(ours, _LONGEST_ANSWER), dump=dump)
        self._workers[pid] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._from_worker(worker))
        self._at(time.monotonic() + START_SECONDS, lambda: None if worker.ready else self._kill(worker))

    def _deadline(self, worker: _Worker, job: _Job, started: float) -> None:
        if worker.jobs.get(job.number) is not job or job.started != started or worker.late:
            return
        worker.late = True
        with suppress(ProcessLookupError):
            os.kill(worker.pid, DUMP_SIGNAL)
        self._at(time.monotonic() + _DUMP_SECONDS, lambda: self._kill(worker))

    def _kill(self, worker: _Worker, why: str = "") -> None:
        """With what it has started."""
        if self._workers.get(worker.pid) is worker:
            worker.why = worker.why or why
            kill_tree(worker.pid)

    def _reap(self, wake: socket.socket) -> None:
        with suppress(BlockingIOError):
            while wake.recv(4096):
                pass
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = True
            if pid in self._workers:
                self._died(self._workers.pop(pid), os.waitstatus_to_exitcode(status))
        if ended:
            for child in children():  # left behind by a worker that has ended
                if child.pid not in self._workers:
                    kill_tree(child.pid)

    def _died(self, worker: _Worker, code: int) -> None:
        with suppress(EOFError):
            while messages := worker.channel.receive():  # what it said before
                for message in messages:
                    self._answer(worker, message)
        if worker.connected:
            self._selector.unregister(worker.channel)
        worker.channel.close()
        frames = dumped_frames(os.pread(worker.dump, 1 << 16, 0).decode(errors="replace"))
        os.close(worker.dump)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == _FAILED_STARTS:
                self._give_up(f"reward workers end before they are ready: {_ending(code)}")
        jobs = list(worker.jobs.values())
        late = too_late(self._setup.timeout).wrong
        killed = -code == signal.SIGKILL and not (worker.late or worker.why)  # by nobody here: for memory, mostly
        for job in jobs:
            if len(jobs) > 1:
                self._by_itself(job)
            elif killed and not job.killed:
                job.killed = True
                self._by_itself(job)
            else:
                wrong = late if worker.late else f"ended its process: {worker.why or _ending(code)}"
                self._failed(job, {"score": None, "metrics": {}, "wrong": wrong, "frames": frames})
        self._start()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _give_up(self, why: str) -> NoReturn:
        tell(self._rank, why)
        end_with_descendants()


def tell(rank: Channel, why: str) -> None:
    """The last thing that the rank hears."""
    rank.send(json.dumps({"ended": why}).encode())
    rank.drain()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name} (out of memory?)" if -code == signal.SIGKILL else name


def main(descriptor: int) -> None:
    """Serve the rank at the other end of a socket."""
    parent = os.getppid()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            end_with_descendants()

    for signum in STOP_SIGNALS:  # those that stop a run are the ranks' to act on
        signal.signal(signum, on_signal)
    tell_of_parents_end(signal.SIGTERM)
    adopt_orphans()
    rank = Channel(socket.socket(fileno=descriptor))
    try:
        while not (messages := rank.receive()):
            rank.wait()
        supervisor = Supervisor(rank, pickle.loads(messages[0]))
        for message in messages[1:]:
            supervisor.accept(message)
        supervisor.run()
    except EOFError:
        end_with_descendants()
    except BaseException:
        tell(rank, f"the process that leads the reward workers failed:\n{traceback.format_exc()}")
        end_with_descendants()

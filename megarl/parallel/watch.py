"""Says which ranks the others wait for, where these ranks are, and ends the job, when a wait takes too long.

Every rank has a thread that looks at its own main thread and talks to nobody. Only a rank that has come to no agreement
of all ranks for nearly the time limit writes into the job's store what it does; the first rank whose wait runs out
reads it. So a healthy job sends nothing, however many ranks it has.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch.distributed as dist

_SHOWN_RANKS, _SHOWN_FRAMES = 4, 6
_REMEMBERED_WAITS = 4096
_SECOND_VOICE_SECONDS = 2.5  # the launcher ends a rank before it says with less what another one says
_TIMED_OUT = ("timed out waiting", "timed out after", "timeout")
_PEER_LOST = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "socket closed",
              "remote process exited", "application timeout caused pair closure")  # fmt: skip


class Stalled(RuntimeError):
    """A wait for other ranks ran out. Its text says who waited, for what, and where the late ranks are."""


class Wait(NamedTuple):
    """A stretch of `Watch.waiting`: the phase, `start` on this process's `time.perf_counter`, and its seconds."""

    phase: str
    start: float
    seconds: float


class Watch:
    """What one rank does: which agreement of all ranks it waits for, or since when it works towards the next.

    Passive until `active`: then it only counts.
    """

    def __init__(self) -> None:
        self._passed = 0  # agreements so far: the same on all ranks, and the name of the next one
        self._since = time.monotonic()
        self._waits_for: str | None = None
        self._phase: Callable[[], str] = str
        self._hosts: list[str] = []
        self._rank, self._limit = 0, float("inf")
        self._join: Callable[[], dist.Store] = _job_store
        self._waits: deque[Wait] = deque(maxlen=_REMEMBERED_WAITS)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """An agreement of all ranks: none gets out before the last one is in.

        Raises:
            Stalled: it took too long, and a rank that is late has a name.
        """
        self._waits_for, began = what, time.perf_counter()
        try:
            yield
        except RuntimeError as e:
            if self._hosts and is_timeout(e):
                raise Stalled(self._explain(what, time.perf_counter() - began)) from None
            raise
        finally:
            self._waits_for = None
            self._waits.append(Wait(self._phase(), began, time.perf_counter() - began))
        self._passed += 1
        self._since = time.monotonic()

    def collect_waits(self) -> list[Wait]:
        """What this rank waited for others since the last call, some thousands of waits at most; starts again from
        none."""
        waits = list(self._waits)
        self._waits.clear()
        return waits

    @contextmanager
    def active(
        self,
        *,
        rank: int,
        hosts: list[str],
        minutes: float,
        phase: Callable[[], str],
        join: Callable[[], dist.Store] | None = None,
    ) -> Iterator[None]:
        """Watch this rank's main thread, which is the caller, meanwhile.

        Args:
            hosts: of every rank.
            minutes: the limit, which is the process groups' too (`trainer.timeout_minutes`).
            phase: names what the rank does.
            join: a connection of its own to the job's store; default that of the environment.
        """
        self._rank, self._hosts, self._limit, self._phase = rank, hosts, minutes * 60, phase
        self._join = join or _job_store
        self._since, ended = time.monotonic(), threading.Event()
        thread = threading.Thread(
            target=self._look, args=(threading.get_ident(), ended), daemon=True, name="megarl-watch"
        )
        thread.start()
        try:
            yield
        except RuntimeError as e:
            if not isinstance(e, Stalled) and is_timeout(e):
                raise Stalled(self._explain("other ranks", self._limit)) from e
            raise
        finally:
            ended.set()
            self._hosts = []

    def _look(self, main_thread: int, ended: threading.Event) -> None:
        """Publish what the main thread does, from shortly before the limit on."""
        notice = self._limit - min(5.0, 0.3 * self._limit)
        store: dist.Store | None = None
        while not ended.wait(min(self._limit / 10, 10.0)):
            if time.monotonic() - self._since < notice:
                continue
            with suppress(
                RuntimeError, KeyError
            ):  # no store any more: the job ends, and others say why; or none at all
                store = store or self._join()
                store.set(self._key(self._rank), json.dumps(self._state(main_thread)))

    def _state(self, main_thread: int) -> dict[str, Any]:
        frame = sys._current_frames().get(main_thread)
        stack = traceback.format_stack(frame)[-_SHOWN_FRAMES:] if frame is not None else []
        return {"waits_for": self._waits_for, "phase": self._phase(), "stack": "".join(stack)}

    def _explain(self, what: str, seconds: float) -> str:
        """Who waited, and for the first rank that asks also who is late and where: the others need not repeat it."""
        waited = f"rank {self._rank} (host {self._hosts[self._rank]}) waited {seconds:.0f} s for {what}"
        try:
            return self._name_the_late(waited)
        except (RuntimeError, KeyError) as e:
            return f"{waited}; the job's store does not say who is late ({e})"

    def _name_the_late(self, waited: str) -> str:
        store = self._join()
        if store.add(f"megarl/stalled/{self._passed}/explained", 1) > 1:
            time.sleep(_SECOND_VOICE_SECONDS)
            return waited
        late, stacks = [], []
        for rank, host in enumerate(self._hosts):
            state = json.loads(store.get(self._key(rank))) if store.check([self._key(rank)]) else None
            if rank == self._rank or (state is not None and state["waits_for"] is not None):
                continue
            where = "gives no sign of life" if state is None else f"in phase {state['phase'] or 'between phases'}"
            late.append(f"rank {rank} (host {host}, {where})")
            if state is not None:
                stacks.append(f"rank {rank} is at\n{state['stack'].rstrip()}")
        if len(late) > _SHOWN_RANKS:
            late[_SHOWN_RANKS:] = [f"{len(late) - _SHOWN_RANKS} more"]
        limit = f"trainer.timeout_minutes = {self._limit / 60:g}"
        return "\n".join([f"{waited} ({limit}); late: {', '.join(late) or 'none by now'}", *stacks[:_SHOWN_RANKS]])

    def _key(self, rank: int) -> str:
        return f"megarl/stalled/{self._passed}/{rank}"


def is_timeout(error: BaseException) -> bool:
    """Whether a collective gave up waiting."""
    return _of_collective(error, _TIMED_OUT)


def is_peer_loss(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, which has, or will have, said more."""
    return _of_collective(error, _PEER_LOST)


def _of_collective(error: BaseException, texts: tuple[str, ...]) -> bool:
    """A verifier's own time-out, say, is nothing that other ranks caused; gloo's errors have no class of their own."""
    said = str(error).lower()
    raised_there = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in said)
    return raised_there and any(text in said for text in texts)


def _job_store() -> dist.Store:
    """A connection of its own: the process group's is locked while its main thread waits in it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)

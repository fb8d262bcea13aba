"""Says which ranks the others wait for, where these ranks are, and ends the job, when a wait takes too long.

Every rank has a thread that looks at its own main thread and talks to nobody. Only a rank that has come to no agreement
of all ranks for nearly the time limit writes into the job's store what it does; the first rank whose wait runs out
reads it. So a healthy job sends nothing, however many ranks it has.

A wait runs out in one of two ways. gloo gives up by itself, in the main thread. NCCL's kernels wait on the GPU, and the
main thread hangs wherever it needs their result: there the rank's own thread notices that no collective was begun in
any group for longer than the limit, says who is late and ends the process, before NCCL's watchdog would.

A rank waits if it is in an agreement, or in a call of torch.distributed, or has begun more collectives than another
rank in the groups that both are in. The others are late.
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
from torch.distributed import distributed_c10d

from megarl.endings import ExitCode
from megarl.parallel.meeting import job_store
from megarl.processes import end_now

_SHOWN_RANKS, _SHOWN_FRAMES = 4, 6
_CALL_DEPTH = 3  # frames of torch.distributed, or of Megatron-Core's sends, above what waits
_WAITS = (os.path.join("torch", "distributed", ""), os.path.join("pipeline_parallel", "p2p_communication.py"))
_SKEW = 8  # agreements by which waiting ranks may be apart: a rank that only sends passes one before the others
_GRACE, _MOST_GRACE = 0.25, 60.0  # of the limit, and seconds: until gloo has given up where it can
_REMEMBERED_WAITS = 4096
_SECOND_VOICE_SECONDS = 2.5  # the launcher ends a rank before it says with less what another one says
_TIMED_OUT = ("timed out waiting", "timed out after", "timeout")
_PEER_LOST = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "socket closed",
              "remote process exited", "application timeout caused pair closure")  # fmt: skip


class Stalled(RuntimeError):
    """Says that a wait for other ranks ran out: who waited, for what, and where the late ranks are."""


class Wait(NamedTuple):
    """Is a wait for other ranks: the phase, `start` on this process's `time.perf_counter`, and its seconds."""

    phase: str
    start: float
    seconds: float


class Watch:
    """Notes what one rank does: which agreement of all ranks it waits for, or since when it works towards the next.

    Passive until `active`: then it only counts.
    """

    def __init__(self) -> None:
        self._passed = 0  # agreements so far: the same on all ranks, and the name of the next one
        self._since = self._waits_since = time.monotonic()
        self._waits_for: str | None = None
        self._phase: Callable[[], str] = str
        self._hosts: list[str] = []
        self._rank, self._limit = 0, float("inf")
        self._join: Callable[[], dist.Store] = job_store
        self._end: Callable[[str], None] = _end_process
        self._explained = False  # by the main thread, or its own: the other need not
        self._waits: deque[Wait] = deque(maxlen=_REMEMBERED_WAITS)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for an agreement of all ranks: none gets out before the last one is in.

        Raises:
            Stalled: it took too long, and a rank that is late has a name.
        """
        self._waits_for, self._waits_since, began = what, time.monotonic(), time.perf_counter()
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

    def waited(self, seconds: float) -> None:
        """Note a wait for other ranks that has just ended, as `collect_waits` tells of those in agreements."""
        self._waits.append(Wait(self._phase(), time.perf_counter() - seconds, seconds))

    def collect_waits(self) -> list[Wait]:
        """Take the waits of this rank for others since the last call, some thousands at most."""
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
        end: Callable[[str], None] | None = None,
    ) -> Iterator[None]:
        """Watch this rank's main thread, which is the caller, meanwhile.

        Args:
            hosts: of every rank.
            minutes: the limit, which is the process groups' too (`trainer.timeout_minutes`).
            phase: names what the rank does.
            join: connects to the job's store; default: `job_store`. The process group's connection is locked while the
                main thread waits in it.
            end: says why and ends the process, from another thread than the main one; default: does so.
        """
        self._rank, self._hosts, self._limit, self._phase = rank, hosts, minutes * 60, phase
        self._join, self._end = join or job_store, end or _end_process
        self._since, self._explained, ended = time.monotonic(), False, threading.Event()
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
            # a watch outlives the run, whose functions it must not hold
            self._hosts, self._phase, self._join, self._end = [], str, job_store, _end_process

    def _look(self, main_thread: int, ended: threading.Event) -> None:
        """Publish what the main thread does, from shortly before the limit on; end the process if it hangs."""
        notice = self._limit - min(5.0, 0.3 * self._limit)
        overdue = self._limit + min(_GRACE * self._limit, _MOST_GRACE)
        store: dist.Store | None = None
        begun, since = _collectives_begun(), time.monotonic()
        while not ended.wait(min(self._limit / 10, 10.0)):
            before, begun = begun, _collectives_begun()
            if begun != before or self._since > since:
                since = time.monotonic()
            if time.monotonic() - self._since < notice:
                continue
            state = self._state(main_thread)
            with suppress(
                RuntimeError, KeyError
            ):  # no store any more: the job ends, and others say why; or none at all
                store = store or self._join()
                store.set(self._key(self._rank), json.dumps(state))
            seconds = time.monotonic() - max(since, self._waits_since)  # a rank that comes late has not waited so long
            just_begun = state["begun"] != begun
            if seconds > overdue and not (just_begun or self._explained) and self._waits_by(state):
                self._end(self._explain(self._waits_for or "other ranks", seconds))
                return

    def _state(self, main_thread: int) -> dict[str, Any]:
        frame = sys._current_frames().get(main_thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        calls = any(part in place.filename for place in stack[-_CALL_DEPTH:] for part in _WAITS)
        return {
            "passed": self._passed,
            "waits": self._waits_for is not None or calls,
            "begun": _collectives_begun(),
            "phase": self._phase(),
            "stack": "".join(traceback.format_list(stack[-_SHOWN_FRAMES:])),
        }

    def _waits_by(self, state: dict[str, Any]) -> bool:
        """Say whether this rank, in that state, waits for others."""
        try:
            return state["waits"] or any(_is_ahead(state, other) for other in self._states(self._join()).values())
        except (RuntimeError, KeyError):
            return bool(state["waits"])

    def _states(self, store: dist.Store) -> dict[int, dict[str, Any]]:
        """Read what the ranks have published of this wait, by rank; ranks without a sign of life are missing."""
        states = {}
        for rank in range(len(self._hosts)):
            if store.check([self._key(rank)]):
                state = json.loads(store.get(self._key(rank)))
                if state["passed"] >= self._passed - _SKEW:  # else of an earlier wait, which ended well
                    states[rank] = state
        return states

    def _explain(self, what: str, seconds: float) -> str:
        """Say who waited, and on the first rank that asks also who is late and where: others need not repeat it."""
        self._explained = True
        waited = f"rank {self._rank} (host {self._hosts[self._rank]}) waited {seconds:.0f} s for {what}"
        try:
            return self._name_the_late(waited)
        except (RuntimeError, KeyError) as e:
            return f"{waited}; the job's store does not say who is late ({e})"

    def _name_the_late(self, waited: str) -> str:
        store = self._join()
        if store.add("megarl/stalled/explained", 1) > 1:
            time.sleep(_SECOND_VOICE_SECONDS)
            return waited
        states = self._states(store)
        late, stacks = [], []
        for rank in self._late(states):
            state, host = states.get(rank), self._hosts[rank]
            where = "gives no sign of life" if state is None else f"in phase {state['phase'] or 'between phases'}"
            late.append(f"rank {rank} (host {host}, {where})")
            if state is not None:
                stacks.append(f"rank {rank} is at\n{state['stack'].rstrip()}")
        if len(late) > _SHOWN_RANKS:
            late[_SHOWN_RANKS:] = [f"{len(late) - _SHOWN_RANKS} more"]
        limit = f"trainer.timeout_minutes = {self._limit / 60:g}"
        return "\n".join([f"{waited} ({limit}); late: {', '.join(late) or 'none by now'}", *stacks[:_SHOWN_RANKS]])

    def _late(self, states: dict[int, dict[str, Any]]) -> list[int]:
        """Find the ranks that wait for nobody: among them the ones that others are ahead of, where there are such."""
        ranks = [rank for rank in range(len(self._hosts)) if rank != self._rank]
        idle = [
            rank
            for rank in ranks
            if rank not in states
            or not (states[rank]["waits"] or any(_is_ahead(states[rank], other) for other in states.values()))
        ]
        behind = [
            rank
            for rank in idle
            if rank not in states or any(_is_ahead(other, states[rank]) for other in states.values())
        ]
        return behind or idle

    def _key(self, rank: int) -> str:
        return f"megarl/stalled/{rank}"


def _collectives_begun() -> dict[str, int]:
    """Count the collectives that this rank has begun in each group of more than one, by the group's name."""
    counts, groups = {}, list[Any](distributed_c10d._world.pg_map)
    for group in groups:
        with suppress(RuntimeError):  # a backend that does not count
            if group.size() > 1:
                counts[str(group.group_name)] = int(group._get_sequence_number_for_group())
    return counts


def _is_ahead(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether a rank has begun more than another in a group of both, and less in none."""
    shared = one["begun"].keys() & other["begun"].keys()
    differences = [one["begun"][name] - other["begun"][name] for name in shared]
    return any(n > 0 for n in differences) and all(n >= 0 for n in differences)


def _end_process(text: str) -> None:
    """End the process: the main thread hangs, and cannot raise."""
    print(f"megarl: {text}", file=sys.stderr, flush=True)
    end_now(ExitCode.STALLED)


def is_timeout(error: BaseException) -> bool:
    """Say whether a collective gave up waiting."""
    return _of_collective(error, _TIMED_OUT)


def is_peer_loss(error: BaseException) -> bool:
    """Say whether a collective failed because another rank is gone, which has, or will have, said more."""
    return _of_collective(error, _PEER_LOST)


def is_communication_failure(error: BaseException) -> bool:
    """Say whether NCCL, gloo or the store failed, for whatever reason."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _of_collective(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Say whether a collective raised the error: a time-out may be a verifier's. gloo's errors have no class."""
    return is_communication_failure(error) and any(text in str(error).lower() for text in texts)

"""Episodes of agents: programs with a loop of their own, which ask an endpoint for what the policy says."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from megarl.environments.agent_process import Job, Outcome
from megarl.environments.agent_workers import AgentWorker
from megarl.environments.speech import Speech
from megarl.rollout.endpoint import Endpoint, Waiting
from megarl.rollout.engine import Request
from megarl.rollout.environments import Rules
from megarl.rollout.episodes import Orders, Played
from megarl.rollout.sessions import Session
from megarl.types import Completion, Rollout, SamplingParams

_WAIT = 1.0  # seconds that the other ranks wait at most before they hear that nothing was decided
_GRACE = 5.0  # seconds over its time until an agent that does not let its event loop run is ended with its process
_ATTEMPTS = 2  # of an episode whose process another one has ended

_Event = Waiting | tuple[AgentWorker, Outcome | None]


class Agents:
    """Owns the endpoint and the processes of a replica, on its first rank; both begin with the first episode.

    Args:
        agent: path/to/file.py:function.
        training: how tokens are drawn in training.
    """

    def __init__(self, agent: str, *, speech: Speech, rules: Rules, training: SamplingParams) -> None:
        self.speech, self.rules, self._agent, self._training = speech, rules, agent, training
        self.events: SimpleQueue[_Event] = SimpleQueue()
        # of episodes and of requests, over the whole run: what is late belongs to nothing that came later
        self.numbers, self.keys = itertools.count(), itertools.count()
        self._endpoint: Endpoint | None = None
        self._workers: list[AgentWorker] = []

    def begin(self, mine: Mapping[int, Rollout], params: SamplingParams) -> WithAgents:
        """A `Source` of these rollouts' episodes."""
        return WithAgents(self, mine, params)

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint(self.events.put, self._training)
        return self._endpoint

    def worker(self, wanted: int) -> AgentWorker:
        """The one with the fewest episodes; a new one, while there are fewer than are wanted and allowed."""
        idle = min(self._workers, key=lambda worker: len(worker.numbers), default=None)
        if idle is None or (idle.numbers and len(self._workers) < min(wanted, self.rules.threads)):
            idle = AgentWorker(self._agent, lambda worker, outcome: self.events.put((worker, outcome)))
            self._workers.append(idle)
        return idle

    def remove(self, worker: AgentWorker) -> None:
        """It is gone, or has to go."""
        if worker in self._workers:
            self._workers.remove(worker)
            worker.kill()

    def close(self) -> None:
        """End the endpoint and the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


@dataclass(frozen=True, kw_only=True)
class _Playing:
    """An episode that is under way."""

    place: int
    attempt: int
    session: Session
    base_url: str
    worker: AgentWorker
    began: float


class WithAgents:
    """A `Source`: every rollout is an episode of an agent."""

    def __init__(self, agents: Agents, rollouts: Mapping[int, Rollout], params: SamplingParams) -> None:
        self._agents, self._rules, self._params = agents, agents.rules, params
        self._rollouts = rollouts
        self._to_begin = deque((place, 1) for place in rollouts)
        self._playing: dict[int, _Playing] = {}
        self._waiting: dict[int, Waiting] = {}
        self._requests: list[Request] = []
        self._forget: list[int] = []
        self.played: dict[int, Sequence[Played]] = {}

    def orders(self, *, wait: bool) -> Orders | None:
        self._begin_more()
        self._take_events(_WAIT if wait and self._playing else 0.0)
        self._end_late()
        self._begin_more()
        over = not (self._to_begin or self._playing)
        if not (self._requests or self._forget or over):
            return None
        orders = Orders(requests=tuple(self._requests), forget=tuple(self._forget), over=over)
        self._requests, self._forget = [], []
        return orders

    def take(self, key: int, completion: Completion) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is None or waiting.gone():
            self._forget.append(key)
        else:
            waiting.answer(completion)

    def _begin_more(self) -> None:
        while self._to_begin and len(self._playing) < self._rules.at_a_time:
            place, attempt = self._to_begin.popleft()
            rollout = self._rollouts[place]
            session = Session(
                rollout,
                self._params,
                speech=self._agents.speech,
                max_turns=self._rules.max_turns,
                max_prompt_length=self._rules.max_prompt_length,
                new_key=self._agents.keys.__next__,
            )
            worker, number = self._agents.worker(len(self._rollouts)), next(self._agents.numbers)
            base_url = self._agents.endpoint.open(session)
            self._playing[number] = _Playing(
                place=place, attempt=attempt, session=session, base_url=base_url, worker=worker, began=time.monotonic()
            )
            row, timeout = dict(rollout.prompt.row), self._rules.timeout
            worker.play(Job(number=number, base_url=base_url, row=row, timeout=timeout))

    def _take_events(self, wait: float) -> None:
        with suppress(Empty):
            event = self._agents.events.get(timeout=wait) if wait else self._agents.events.get_nowait()
            while True:
                self._take_event(event)
                event = self._agents.events.get_nowait()

    def _take_event(self, event: _Event) -> None:
        if isinstance(event, Waiting):
            if event.session.closed:
                event.answer(None)
                return
            self._waiting[event.request.key] = event
            self._requests.append(event.request)
            return
        worker, outcome = event
        if outcome is None:
            self._lost(worker, f"agent: the process {worker.how_it_ended()}")
        elif (playing := self._playing.get(outcome.number)) is not None:
            reward, error = outcome.reward, outcome.error
            if reward is not None and not math.isfinite(reward):
                reward, error = None, f"returned {reward}, which is not finite"
            self._end(outcome.number, reward=reward, error=error and self._described(playing, error))

    def _end_late(self) -> None:
        """End processes of agents that neither end in time nor let the others run."""
        now = time.monotonic()
        for number, playing in tuple(self._playing.items()):
            if number in self._playing and now - playing.began > self._rules.timeout + _GRACE:
                error = f"took longer than {self._rules.timeout:g} s and held up the other agents of its process"
                self._end(number, error=self._described(playing, error))
                self._lost(playing.worker, "agent: another agent of its process held it up")

    def _lost(self, worker: AgentWorker, error: str) -> None:
        """A process is gone: its episodes begin again, unless that has happened to them before."""
        self._agents.remove(worker)
        for number, playing in tuple(self._playing.items()):
            if playing.worker is not worker:
                continue
            if playing.attempt < _ATTEMPTS:
                self._close(number, error=error)
                self._to_begin.append((playing.place, playing.attempt + 1))
            else:
                self._end(number, error=error)

    def _end(self, number: int, *, reward: float | None = None, error: str | None = None) -> None:
        place = self._playing[number].place
        self.played[place] = self._close(number, reward=reward, error=error)

    def _close(self, number: int, *, reward: float | None = None, error: str | None = None) -> list[Played]:
        playing = self._playing.pop(number)
        playing.worker.numbers.discard(number)
        endpoint = self._agents.endpoint
        with endpoint.lock:
            keys = playing.session.keys
            seconds = time.monotonic() - playing.began
            played = playing.session.close(reward=reward, error=error, seconds=seconds)
        endpoint.drop(playing.base_url)
        self._forget += keys
        for key in keys:
            if (waiting := self._waiting.pop(key, None)) is not None:
                waiting.answer(None)
        return played

    def _described(self, playing: _Playing, error: str) -> str:
        prompt = self._rollouts[playing.place].prompt
        reason, _, frames = error.partition("\n")
        return f"agent: {reason}; row {prompt.source or prompt.index}\n{frames}".rstrip()

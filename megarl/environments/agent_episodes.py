"""Plays episodes of agents: programs with a loop of their own, which ask an endpoint for the policy's replies."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from megarl.environments.agent_process import NO_AGENT, AgentResult, AgentTask
from megarl.environments.agent_workers import GRACE, AgentWorker
from megarl.environments.endpoint import Endpoint, Waiting
from megarl.environments.environment_episodes import EpisodeLimits
from megarl.environments.episodes import Orders, Played
from megarl.environments.sessions import Session
from megarl.environments.speech import Speech
from megarl.rewards.results import RewardError
from megarl.rollout.engine import Request
from megarl.types import Completion, Rollout, SamplingParams

_WAIT = 1.0  # seconds that the other ranks wait at most before they hear that nothing was decided
_STARTING = 300.0  # seconds that importing an agent may take, where files are slow and many begin at once
_GRACE = 3.0  # seconds over its time until an agent that does not let its event loop run is ended with its process

_Event = Waiting | tuple[AgentWorker, AgentResult | None]


class Agents:
    """Owns the endpoint and the processes of a replica, on its first rank; both start with the first episode.

    Args:
        agent: path/to/file.py:function.
        training: how tokens are drawn in training.
    """

    def __init__(self, agent: str, *, speech: Speech, limits: EpisodeLimits, training: SamplingParams) -> None:
        self.speech, self.limits, self._agent, self._training = speech, limits, agent, training
        self.events: SimpleQueue[_Event] = SimpleQueue()
        # of episodes and of requests, over the whole run: a late message matches no later episode or request
        self.numbers, self.keys = itertools.count(), itertools.count()
        self._endpoint: Endpoint | None = None
        self._workers: list[AgentWorker] = []
        self._alone: list[AgentWorker] = []

    def begin(self, mine: Mapping[int, Rollout], params: SamplingParams) -> WithAgents:
        """Make the `Source` of these rollouts' episodes."""
        return WithAgents(self, mine, params)

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint(self.events.put, self._training)
        return self._endpoint

    def worker(self, episodes: int, *, alone: bool = False) -> AgentWorker:
        """Choose the process with the fewest episodes, or start one, up to `episodes` processes and the limit.

        Args:
            alone: start a process that no other episode gets.
        """
        idle = min(self._workers, key=lambda worker: len(worker.numbers), default=None)
        if alone or idle is None or (idle.numbers and len(self._workers) < min(episodes, self.limits.threads)):
            idle = AgentWorker(self._agent, lambda worker, result: self.events.put((worker, result)))
            (self._alone if alone else self._workers).append(idle)
        return idle

    def remove(self, worker: AgentWorker) -> None:
        """End a process, which may have ended by itself."""
        for workers in (self._workers, self._alone):
            if worker in workers:
                workers.remove(worker)
                worker.close(0.0)

    def close(self) -> None:
        """End the endpoint and the processes."""
        workers, by = [*self._workers, *self._alone], time.monotonic() + GRACE
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.close(max(0.0, by - time.monotonic()))
        self._workers, self._alone = [], []
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


@dataclass(frozen=True, kw_only=True)
class _OpenEpisode:
    """Holds an episode that is under way.

    Attributes:
        alone: it runs in a process of its own, since it may be the reason why an earlier process ended.
    """

    place: int
    alone: bool
    session: Session
    base_url: str
    worker: AgentWorker
    began: float


class WithAgents:
    """Implements `Source`: every rollout is an episode of an agent."""

    def __init__(self, agents: Agents, rollouts: Mapping[int, Rollout], params: SamplingParams) -> None:
        self._agents, self._limits, self._params = agents, agents.limits, params
        self._rollouts = rollouts
        self._to_begin = deque(rollouts)
        self._suspects: deque[int] = deque()
        self._open: dict[int, _OpenEpisode] = {}
        self._waiting: dict[int, Waiting] = {}
        self._requests: list[Request] = []
        self._forget: list[int] = []
        self.played: dict[int, Sequence[Played]] = {}

    def orders(self, *, wait: bool) -> Orders | None:
        self._begin_more()
        self._take_events(_WAIT if wait and self._open else 0.0)
        self._end_late()
        self._begin_more()
        over = not (self._to_begin or self._suspects or self._open)
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
        most = self._limits.at_a_time
        while self._to_begin and len(self._open) < most:
            self._begin(self._to_begin.popleft(), alone=False)
        processes = self._limits.threads
        while self._suspects and sum(episode.alone for episode in self._open.values()) < processes:
            self._begin(self._suspects.popleft(), alone=True)

    def _begin(self, place: int, *, alone: bool) -> None:
        rollout, limits = self._rollouts[place], self._limits
        session = Session(
            rollout,
            self._params,
            speech=self._agents.speech,
            max_turns=limits.max_turns,
            max_prompt_length=limits.max_prompt_length,
            new_key=self._agents.keys.__next__,
        )
        worker, number = self._agents.worker(len(self._rollouts), alone=alone), next(self._agents.numbers)
        base_url = self._agents.endpoint.open(session)
        self._open[number] = _OpenEpisode(
            place=place, alone=alone, session=session, base_url=base_url, worker=worker, began=time.monotonic()
        )
        worker.play(AgentTask(number=number, base_url=base_url, row=dict(rollout.prompt.row), timeout=limits.timeout))

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
        worker, result = event
        if result is not None and result.number == NO_AGENT:
            raise RewardError(str(result.error), everywhere=False)
        if result is None:
            self._lost(worker, f"its process {worker.ending()}")
        elif (episode := self._open.get(result.number)) is not None:
            at_limit = result.raised and episode.session.at_limit  # agents raise an error when they read of a limit
            error = None if at_limit else result.error and self._described(episode, result.error)
            self._end(result.number, reward=result.reward, error=error)

    def _end_late(self) -> None:
        """End processes whose agents neither end in time nor let the others run. The time of an episode begins once its
        process has imported the agent."""
        now, limit = time.monotonic(), self._limits.timeout
        for worker in {id(episode.worker): episode.worker for episode in self._open.values()}.values():
            began = min(episode.began for episode in self._open.values() if episode.worker is worker)
            if worker.ready > now:
                if now - began > _STARTING:
                    self._lost(worker, f"importing it took longer than {_STARTING:g} s")
            elif now - max(began, worker.ready) > limit + _GRACE:
                self._lost(worker, f"took longer than environment.timeout = {limit:g} s, and let nothing else run")

    def _lost(self, worker: AgentWorker, error: str) -> None:
        """Remove a process and begin its episodes again, each alone: one of them may be the reason."""
        self._agents.remove(worker)
        for number, episode in tuple(self._open.items()):
            if episode.worker is not worker:
                continue
            if episode.alone:
                self._end(number, error=self._described(episode, error))
            else:
                self._close(number, error=error)
                self._suspects.append(episode.place)

    def _end(self, number: int, *, reward: float | None = None, error: str | None = None) -> None:
        episode = self._open[number]
        self.played[episode.place] = self._close(number, reward=reward, error=error)
        if episode.alone:
            self._agents.remove(episode.worker)

    def _close(self, number: int, *, reward: float | None = None, error: str | None = None) -> list[Played]:
        episode = self._open.pop(number)
        episode.worker.numbers.discard(number)
        endpoint = self._agents.endpoint
        with endpoint.lock:
            keys = episode.session.keys
            seconds = time.monotonic() - episode.began
            played = episode.session.close(reward=reward, error=error, seconds=seconds)
        endpoint.drop(episode.base_url)
        self._forget += keys
        for key in keys:
            if (waiting := self._waiting.pop(key, None)) is not None:
                waiting.answer(None)
        return played

    def _described(self, episode: _OpenEpisode, error: str) -> str:
        prompt = self._rollouts[episode.place].prompt
        reason, _, frames = error.partition("\n")
        return f"agent: {reason}; row {prompt.source or prompt.index}\n{frames}".rstrip()

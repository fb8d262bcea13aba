"""Plays episodes with environments: while one of them works, the engine decodes the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.data.readers import Row, value_or_none
from megarl.data.tools import tools_of
from megarl.environments.calls import Answer, Calls
from megarl.environments.environment import Environment, MakeEnvironment, Turn
from megarl.environments.episodes import Orders, Played
from megarl.environments.speech import Speech
from megarl.rewards.results import NoScore, finite, number, shown
from megarl.rollout.engine import Request
from megarl.types import Completion, Episode, FinishReason, Rollout, SamplingParams, Tokens

_WAIT = 1.0  # seconds that the other ranks wait at most before they hear that nothing was decided


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Bounds the length of episodes, and the number of those that run at a time.

    Attributes:
        max_turns: responses of the policy.
        max_prompt_length: tokens of a prompt with an environment's first observation.
        at_a_time: episodes of a replica.
        timeout: seconds of a step.
        threads: how many run steps.
    """

    max_turns: int
    max_prompt_length: int
    at_a_time: int
    timeout: float
    threads: int


@dataclass(kw_only=True)
class _OpenEpisode:
    """Holds an episode that is under way."""

    rollout: Rollout
    chat: bool
    environment: Environment | None = None
    prompt_ids: tuple[int, ...] | None = None
    response: Tokens = field(default_factory=Tokens)
    turns: int = 0
    seconds: float = 0.0
    reward: float | None = None
    cut_off: bool = False

    def played(self, finish_reason: FinishReason, *, limited: bool = False, error: str | None = None) -> Played:
        return Played(
            prompt_ids=self.prompt_ids,
            response=self.response,
            finish_reason=finish_reason,
            reward=None if error else self.reward,
            episode=Episode(turns=self.turns, seconds=self.seconds, limited=limited, error=error),
        )


class WithEnvironments:
    """Implements `Source`: every rollout is an episode of an environment of its own.

    Args:
        prompt_key: column of the prompts, which says whether they are chats.
        tools_key: column of the tools that a row offers.
    """

    def __init__(
        self,
        rollouts: Mapping[int, Rollout],
        params: SamplingParams,
        *,
        make: MakeEnvironment,
        speech: Speech,
        limits: EpisodeLimits,
        prompt_key: str,
        tools_key: str = "",
    ) -> None:
        self._params, self._make, self._speech, self._limits = params, make, speech, limits
        self._prompt_key, self._tools_key = prompt_key, tools_key
        self._calls = Calls(threads=limits.threads, timeout=limits.timeout)
        self._to_begin = deque(rollouts.items())
        self._open: dict[int, _OpenEpisode] = {}
        self._requests: list[Request] = []
        self._forget: list[int] = []
        self.played: dict[int, Sequence[Played]] = {}

    def orders(self, *, wait: bool) -> Orders | None:
        self._begin_more()
        for answer in self._calls.answers(_WAIT if wait and not self._requests else 0.0):
            what, place = answer.key
            if what == "close":
                self._closed(place, answer)
            else:
                self._answered(place, what, answer)
        self._begin_more()
        over = not (self._to_begin or self._open or self._calls.open or self._requests)
        if self._calls.open and not (self._requests or self._forget):
            return None
        orders = Orders(
            requests=tuple(self._requests),
            forget=tuple(self._forget),
            over=over,
            quiet=not self._calls.open,
        )
        self._requests, self._forget = [], []
        if over:
            self._calls.close()
        return orders

    def take(self, key: int, completion: Completion) -> None:
        episode = self._open[key]
        ids = completion.response.ids[len(episode.response) :]
        episode.response = completion.response
        episode.turns += 1
        episode.cut_off = completion.finish_reason == "length"
        environment, response = episode.environment, self._speech.tokenizer.decode(ids)
        assert environment is not None
        self._calls.submit(("step", key), partial(environment.step, response))

    def _begin_more(self) -> None:
        while self._to_begin and len(self._open) < self._limits.at_a_time:
            place, rollout = self._to_begin.popleft()
            prompt = value_or_none(rollout.prompt.row, self._prompt_key)
            self._open[place] = _OpenEpisode(rollout=rollout, chat=isinstance(prompt, list))
            self._calls.submit(("reset", place), partial(self._reset, self._open[place]))

    def _reset(self, episode: _OpenEpisode) -> str | Sequence[int] | None:
        """Make and reset an environment, in a thread. Record it first: it is closed even if `reset` fails."""
        episode.environment = self._make()
        return episode.environment.reset(deepcopy(episode.rollout.prompt.row))

    def _answered(self, place: int, what: str, answer: Answer) -> None:
        episode = self._open[place]
        episode.seconds += answer.seconds
        if answer.error is not None:
            self._end(place, "stop", error=self._described(episode, what, answer.error))
            return
        try:
            if what == "reset":
                self._opened(place, episode, answer.value)
            else:
                self._stepped(place, episode, answer.value)
        except (ValueError, TypeError, NoScore) as e:
            self._end(place, "stop", error=self._described(episode, what, str(e)))

    def _opened(self, place: int, episode: _OpenEpisode, observation: str | Sequence[int] | None) -> None:
        prompt = episode.rollout.prompt
        if observation is not None:
            _check_observation(observation)
        if observation:
            content = value_or_none(prompt.row, self._prompt_key)
            tools = tools_of(Row(prompt.source, prompt.row), self._tools_key)
            ids = self._speech.opening(content, observation, prompt.token_ids, tools=tools)
            if len(ids) > self._limits.max_prompt_length:
                raise ValueError(
                    f"begins with an observation that makes the prompt {len(ids)} tokens long, more than "
                    f"data.max_prompt_length = {self._limits.max_prompt_length}"
                )
            episode.prompt_ids = tuple(ids)
        self._ask(place, episode)

    def _stepped(self, place: int, episode: _OpenEpisode, turn: object) -> None:
        if not isinstance(turn, Turn):
            raise ValueError(f"returned {shown(turn)}, and no Turn")
        if turn.reward is not None:
            together = (episode.reward or 0.0) + number(turn.reward, "gave the reward ")
            episode.reward = finite(together, "gave rewards that add up to ")
        if turn.done or episode.cut_off:
            self._end(place, "length" if episode.cut_off else "stop", limited=episode.cut_off)
            return
        _check_observation(turn.observation)
        ids = self._speech.answer(turn.observation, chat=episode.chat, last=episode.response.ids[-1])
        if episode.turns >= self._limits.max_turns or len(episode.response) + len(ids) >= self._params.max_tokens:
            self._end(place, "length", limited=True)
            return
        episode.response = episode.response.observed(ids)
        self._ask(place, episode)

    def _ask(self, place: int, episode: _OpenEpisode) -> None:
        rollout = episode.rollout
        self._requests.append(
            Request(
                key=place,
                prompt=episode.prompt_ids or rollout.prompt.token_ids,
                params=self._params,
                seed=rollout.seed,
                response=episode.response,
                turn_start=len(episode.response),
                keep=True,
            )
        )

    def _end(self, place: int, finish_reason: FinishReason, *, limited: bool = False, error: str | None = None) -> None:
        episode = self._open.pop(place)
        self.played[place] = [episode.played(finish_reason, limited=limited, error=error)]
        self._forget.append(place)
        if episode.environment is not None:
            self._calls.submit(("close", place), episode.environment.close)

    def _closed(self, place: int, answer: Answer) -> None:
        """Fail the episode of an environment whose `close` failed, and drop its reward."""
        (played,) = self.played[place]
        if answer.error is not None and played.episode.error is None:
            error = f"environment: close {answer.error}"
            self.played[place] = [replace(played, reward=None, episode=replace(played.episode, error=error))]

    def _described(self, episode: _OpenEpisode, what: str, error: str) -> str:
        prompt = episode.rollout.prompt
        reason, _, frames = error.partition("\n")
        where = f"row {prompt.source or prompt.index}, turn {episode.turns}"
        return f"environment: {what} {reason}; {where}\n{frames}".rstrip()


def _check_observation(observation: object) -> None:
    if not isinstance(observation, str | Sequence) or isinstance(observation, bytes):
        raise ValueError(f"observed {shown(observation)}, which is neither text nor token ids")

"""Generates responses that environments and agents answer, each in its own time.

Within a replica the first rank decides on the engine's next requests and tells the others: see `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megarl.environments.broadcast import Broadcast
from megarl.parallel.generation_groups import GenerationGroups
from megarl.rollout.engine import Engine, Request
from megarl.rollout.gathering import tell_responses
from megarl.rollout.replicas import OnFinished, sample_seed, share_of
from megarl.rollout.served import Served
from megarl.types import Completion, Episode, FinishReason, Rollout, SamplingParams, Tokens


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Tells the engine what to do next.

    Attributes:
        requests: to be served.
        forget: keys of requests that will not be continued.
        over: no more orders will come, and nobody wants what is still in the engine.
        quiet: no more orders will come before one of the requests is finished.
    """

    requests: tuple[Request, ...] = ()
    forget: tuple[int, ...] = ()
    over: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Played:
    """Holds a response of an episode: a `Rollout` without the fields that all ranks know.

    Attributes:
        prompt_ids: the prompt that it answers, where that is not the row's.
    """

    prompt_ids: tuple[int, ...] | None = None
    response: Tokens = field(default_factory=Tokens)
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    episode: Episode

    def of(self, rollout: Rollout) -> Rollout:
        """Complete a rollout with this response."""
        prompt = rollout.prompt if self.prompt_ids is None else replace(rollout.prompt, token_ids=self.prompt_ids)
        return replace(
            rollout,
            prompt=prompt,
            response=self.response,
            finish_reason=self.finish_reason,
            reward=self.reward,
            episode=self.episode,
        )


class Source(Protocol):
    """Answers the policy, on a replica's first rank."""

    def orders(self, *, wait: bool) -> Orders | None:
        """Return the orders since the last time; None: there are none.

        Args:
            wait: the engine has nothing to do, so that this may wait for orders, for a second or so.
        """

    def take(self, key: int, completion: Completion) -> None:
        """Take the completion of a request from the engine."""

    @property
    def played(self) -> Mapping[int, Sequence[Played]]:
        """Return the responses of finished episodes, by the rollout's place: one or, where a conversation began anew,
        several, of which the last is scored."""


Begin = Callable[[Mapping[int, Rollout], SamplingParams], Source]
"""(a replica's rollouts by place, how their tokens are drawn) -> the source that answers them."""


def serve(engine: Engine, source: Source | None, broadcast: Broadcast[Orders]) -> None:
    """Run the engine until the source says that all is over; every rank of the replica calls it.

    Args:
        source: None on all ranks but the first.
    """
    kept: set[int] = set()
    served, quiet = Served(engine), False
    while True:
        if not quiet:
            orders = broadcast.share(None if source is None else source.orders(wait=not served.busy))
            if orders is not None:
                engine.forget(orders.forget)
                if orders.over:
                    break
                served.submit(orders.requests)
                kept.difference_update(orders.forget)
                kept.update(request.key for request in orders.requests if request.keep)
                quiet = orders.quiet
        if served.busy:
            finished = served.step()
            quiet = quiet and not finished
            if source is not None:
                for key, completion in finished.items():
                    source.take(key, completion)
    served.interrupt()
    engine.forget(kept)


class Episodes:
    """Plays the episodes of rollouts, over all replicas. Every rank builds an instance, and makes the same calls.

    Args:
        begin: makes the source that answers a replica's rollouts; called on its first rank.
        close: gives back what `begin` took.
    """

    def __init__(self, groups: GenerationGroups, begin: Begin, close: Callable[[], None] = lambda: None) -> None:
        self._groups, self._begin, self._close = groups, begin, close
        self._broadcast: Broadcast[Orders] = Broadcast(groups.control)

    def play(
        self,
        engine: Engine,
        rollouts: Sequence[Rollout],
        params: SamplingParams,
        *,
        version: int,
        on_finished: OnFinished | None = None,
        everywhere: bool = True,
    ) -> list[Rollout]:
        """Finish the rollouts, on every rank. A rollout whose conversation began anew becomes several.

        Args:
            everywhere: every rank gets all tokens; else the first rank of a replica keeps those of its responses, and
                the others get their outlines.
        """
        mine = share_of(self._groups, rollouts)
        source = self._begin(mine, params) if self._broadcast.leads else None
        serve(engine, source, self._broadcast)
        played = {} if source is None else source.played
        own = {
            (place, number): replace(part, response=part.response.with_version(version))
            for place, parts in played.items()
            for number, part in enumerate(parts)
        }
        parts_of: dict[int, list[Played]] = {}
        for (place, _), part in tell_responses(self._groups, own, "all episodes", everywhere=everywhere).items():
            parts_of.setdefault(place, []).append(part)
        results = []
        for place, rollout in enumerate(rollouts):
            parts = [part.of(rollout) for part in parts_of[place]]
            results += parts
            if on_finished is not None and place in played:
                on_finished(place, parts[-1])
        return results

    def close(self) -> None:
        """Give back what the sources took."""
        self._close()


def seed_of(seed: int, number: int) -> int:
    """Compute the seed of a rollout's part; part 0 has the rollout's own."""
    return seed if number == 0 else sample_seed(seed, number, 0, 0)

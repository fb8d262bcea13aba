"""Generation of responses that somebody answers: environments and agents, each in its own time.

Within a replica the first rank decides what the engine is asked next, and the others are told: see `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megarl.environments.broadcast import Broadcast
from megarl.parallel.generation_groups import GenerationGroups
from megarl.rollout.engine import Engine, Request
from megarl.rollout.replicas import OnFinished, sample_seed, share_of
from megarl.types import Completion, Episode, FinishReason, Rollout, SamplingParams, Tokens


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the engine does next.

    Attributes:
        requests: to be served.
        forget: keys of what will not be gone on with.
        over: nothing more will come, and what is still in the engine is not wanted.
        quiet: nobody will decide anything before one of the requests is finished.
    """

    requests: tuple[Request, ...] = ()
    forget: tuple[int, ...] = ()
    over: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Played:
    """A response as an episode left it: `Rollout` without what all ranks know.

    Attributes:
        prompt_ids: what it answers, where that is not the row's prompt.
    """

    prompt_ids: tuple[int, ...] | None = None
    response: Tokens = field(default_factory=Tokens)
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    episode: Episode

    def of(self, rollout: Rollout, version: int) -> Rollout:
        """The rollout that was begun, as it is now."""
        prompt = rollout.prompt if self.prompt_ids is None else replace(rollout.prompt, token_ids=self.prompt_ids)
        return replace(
            rollout,
            prompt=prompt,
            response=self.response.with_version(version),
            finish_reason=self.finish_reason,
            reward=self.reward,
            episode=self.episode,
        )


class Source(Protocol):
    """What answers the policy, on a replica's first rank."""

    def orders(self, *, wait: bool) -> Orders | None:
        """What was decided since the last time; None: nothing.

        Args:
            wait: the engine has nothing to do: something may be waited for, for a second or so.
        """

    def take(self, key: int, completion: Completion) -> None:
        """A request that the engine has finished."""

    @property
    def played(self) -> Mapping[int, Sequence[Played]]:
        """What came of each rollout, by place, once it is over: one response or, where a conversation was begun anew,
        several, of which the last is the one that is scored."""


Begin = Callable[[Mapping[int, Rollout], SamplingParams], Source]
"""(a replica's rollouts by place, how their tokens are drawn) -> what answers them."""


def serve(engine: Engine, source: Source | None, broadcast: Broadcast[Orders]) -> None:
    """The engine's work until the source says that it is over; every rank of the replica calls it.

    Args:
        source: None on all ranks but the first.
    """
    kept: set[int] = set()
    quiet = False
    while True:
        if not quiet:
            orders = broadcast.share(None if source is None else source.orders(wait=not engine.busy))
            if orders is not None:
                engine.forget(orders.forget)
                if orders.over:
                    break
                engine.submit(orders.requests)
                kept.difference_update(orders.forget)
                kept.update(request.key for request in orders.requests if request.keep)
                quiet = orders.quiet
        if engine.busy:
            finished = engine.step()
            quiet = quiet and not finished
            if source is not None:
                for key, completion in finished.items():
                    source.take(key, completion)
    engine.interrupt()
    engine.forget(kept)


class Episodes:
    """Plays the episodes of rollouts, over all replicas. Every rank builds one, and makes the same calls.

    Args:
        begin: what answers a replica's rollouts; called on its first rank.
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
    ) -> list[Rollout]:
        """The rollouts, finished; on every rank. A rollout whose conversation began anew has become several."""
        mine = share_of(self._groups, rollouts)
        source = self._begin(mine, params) if self._broadcast.leads else None
        serve(engine, source, self._broadcast)
        played = None if source is None else {place: tuple(parts) for place, parts in source.played.items()}
        everyone = {
            place: parts
            for part in self._groups.world.all_gather(played, "all episodes")
            if part is not None
            for place, parts in part.items()
        }
        made = []
        for place, rollout in enumerate(rollouts):
            parts = [one.of(rollout, version) for one in everyone[place]]
            made += parts
            if on_finished is not None and played is not None and place in played:
                on_finished(place, parts[-1])
        return made

    def close(self) -> None:
        """End what works for it."""
        self._close()


def seed_of(seed: int, number: int) -> int:
    """The seed of a rollout's `number`-th part; the first one's is the rollout's."""
    return seed if number == 0 else sample_seed(seed, number, 0, 0)

"""Generates over all replicas: decides who generates which responses, with which seeds, and tells everybody."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.parallel.generation_groups import GenerationGroups
from megarl.rollout.engine import Engine, Request
from megarl.rollout.gathering import tell_responses
from megarl.rollout.served import Served
from megarl.types import Completion, Outline, Prompt, Rollout, SamplingParams, Tokens

OnFinished = Callable[[int, Rollout], None]
"""(place among the rollouts, a finished response), called by the first rank of the replica that finished it."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Says at how many finished groups generation stops; each replica has its share of them.

    Replicas do not talk about it, and a share is a number of groups, not a time: a run repeats itself bit for bit.

    Attributes:
        groups: finished groups that are wanted, over all replicas.
        required: groups that have to be among them.
    """

    groups: int
    required: frozenset[int] = frozenset()

    def share(self, replica: int, replicas: int) -> int:
        """Count the finished groups that a replica makes: 3, 3, 2 and 2 of 10 over 4 replicas."""
        return self.groups // replicas + (replica < self.groups % replicas)


def begin_rollouts(
    prompts: Sequence[Prompt], n: int, *, seed: int, round_: int, draw: int = 0, first_group: int = 0
) -> list[Rollout]:
    """Make `n` responses to each prompt, none of them begun. A prompt that is there twice is answered twice.

    Args:
        seed, round_, draw: with the prompt's index and the sample's number they make each response's seed.
        first_group: number of the first prompt's group; the others follow.
    """
    begun, seen = [], Counter[int]()
    for i, prompt in enumerate(prompts):
        first = seen[prompt.index] * n
        seen[prompt.index] += 1
        begun += [
            Rollout(
                prompt=prompt,
                group=first_group + i,
                sample=j,
                seed=sample_seed(seed, round_, prompt.index, first + j, draw),
            )
            for j in range(n)
        ]
    return begun


def generate_rollouts(
    engine: Engine,
    groups: GenerationGroups,
    rollouts: Sequence[Rollout],
    params: SamplingParams,
    *,
    version: int = 0,
    on_finished: OnFinished | None = None,
    quota: Quota | None = None,
    everywhere: bool = True,
) -> list[Rollout]:
    """Finish responses, and return them in the same order on every rank, for every generation layout.

    A replica takes every `replicas`-th group with all its samples, so that they share the prompt's prefill.

    Args:
        everywhere: every rank gets all tokens; else a replica's ranks keep those of its responses, and the others get
            their outlines.
        rollouts: not begun, or under way; those that are finished stay as they are.
        version: of the weights.
        on_finished: is told of each response as soon as it is finished.
        quota: where to stop; what is not finished then stays under way.
    """
    if not everywhere:
        rollouts = brought(groups, rollouts)
    mine = share_of(groups, rollouts)
    share = None if quota is None else _Share(mine, quota.share(groups.replica, groups.layout.replicas), quota.required)
    completions: dict[int, Completion] = {}
    for i, completion in _generate(engine, mine, params, share):
        completions[i] = completion
        if on_finished is not None and groups.tp_rank == 0 and completion.finish_reason is not None:
            response = completion.response.with_version(version)
            on_finished(i, _continued(mine[i], replace(completion, response=response)))
    own = {
        i: replace(completion, response=completion.response.with_version(version))
        for i, completion in completions.items()
        if everywhere or completion.response  # of one that has not begun there is nothing to tell
    }
    everyone = tell_responses(groups, own, "all completions", everywhere=everywhere)
    return [_continued(r, everyone[i]) if i in everyone else r for i, r in enumerate(rollouts)]


def brought(groups: GenerationGroups, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Bring the tokens of unfinished responses from the replicas that have them to those that go on with them."""
    replica_of = replicas_of_groups(rollouts, groups.layout.replicas)
    moves: dict[int, tuple[int, int]] = {}  # place -> replica that has its tokens, and one that wants them
    for i, rollout in enumerate(rollouts):
        response, wanted = rollout.response, replica_of[rollout.group]
        had = response.holder if isinstance(response, Outline) else groups.replica
        if rollout.finish_reason is None and len(response) and had != wanted:
            moves[i] = had, wanted
    if not moves:
        return list(rollouts)
    parts = [b""] * groups.world.size
    for replica in {wanted for had, wanted in moves.values() if had == groups.replica}:
        sent = {i: rollouts[i].tokens for i, move in moves.items() if move == (groups.replica, replica)}
        parts[groups.layout.replica_ranks(replica)[groups.tp_rank]] = pickle.dumps(sent)
    arrived: dict[int, Tokens] = {}
    for part in groups.world.exchange_bytes(parts, "responses that another replica goes on with"):
        arrived |= pickle.loads(part) if part else {}
    result = list(rollouts)
    for i, (_, wanted) in moves.items():
        before = rollouts[i].response
        outline = before if isinstance(before, Outline) else before.outline(wanted)
        result[i] = replace(rollouts[i], response=arrived.get(i) or replace(outline, holder=wanted))
    return result


def share_of(groups: GenerationGroups, rollouts: Sequence[Rollout]) -> dict[int, Rollout]:
    """Return the rollouts that this rank's replica generates, by place."""
    replica_of = replicas_of_groups(rollouts, groups.layout.replicas)
    return {i: rollout for i, rollout in enumerate(rollouts) if replica_of[rollout.group] == groups.replica}


def replicas_of_groups(rollouts: Sequence[Rollout], replicas: int) -> dict[int, int]:
    """Return the replica that generates a group's responses, by group."""
    order = dict.fromkeys(rollout.group for rollout in rollouts)
    return {group: i % replicas for i, group in enumerate(order)}


class _Share:
    """Counts a replica's finished groups."""

    def __init__(self, mine: Mapping[int, Rollout], wanted: int, required: frozenset[int]) -> None:
        self._mine, self._wanted, self._required = mine, wanted, required
        unfinished = [rollout.group for rollout in mine.values() if rollout.finish_reason is None]
        self._unfinished = Counter(unfinished)
        self._finished = len({rollout.group for rollout in mine.values()}) - len(self._unfinished)

    def finish(self, place: int) -> None:
        group = self._mine[place].group
        self._unfinished[group] -= 1
        if not self._unfinished[group]:
            del self._unfinished[group]
            self._finished += 1

    @property
    def reached(self) -> bool:
        return self._finished >= self._wanted and not (self._required & self._unfinished.keys())


def _generate(
    engine: Engine, mine: Mapping[int, Rollout], params: SamplingParams, share: _Share | None
) -> Iterator[tuple[int, Completion]]:
    """Yield place and completion of each response as it is finished, then of those that are left under way."""
    served = Served(engine)
    served.submit(
        [
            Request(key=i, prompt=rollout.prompt.token_ids, params=params, seed=rollout.seed, response=rollout.tokens)
            for i, rollout in mine.items()
            if rollout.finish_reason is None
        ]
    )
    while served.busy:
        if share is not None and share.reached:
            yield from served.interrupt().items()
            return
        for i, completion in served.step().items():
            if share is not None:
                share.finish(i)
            yield i, completion


def _continued(rollout: Rollout, completion: Completion) -> Rollout:
    return replace(rollout, response=completion.response, finish_reason=completion.finish_reason)


def sample_seed(seed: int, round_: int, prompt: int, sample: int, draw: int = 0) -> int:
    """Compute a 63-bit seed that depends on nothing but its arguments."""
    which = f"{seed}/{round_}/{prompt}/{sample}" + (f"/{draw}" if draw else "")
    digest = hashlib.blake2b(which.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

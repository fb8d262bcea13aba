"""Scores the rollouts, spread over all ranks."""

from __future__ import annotations

from collections.abc import Callable

from megarl.parallel.groups import Groups
from megarl.rewards.judge import Failure, RewardError, judge
from megarl.trainer.inputs import Inputs
from megarl.types import Rollouts

Score = Callable[[Rollouts], Rollouts]
"""Rollouts -> the same with `rewards`; every rank calls it."""


def score(rollouts: Rollouts, inputs: Inputs, groups: Groups, say: Callable[[str], None]) -> Rollouts:
    """The same rollouts with `rewards`; rank r scores every world-size-th response, everybody gets all scores.

    With `reward.on_error=drop` a response that could not be scored has the reward None, and one line says how many of
    them there are.

    Args:
        say: shows that line.

    Raises:
        RewardError: a response could not be scored, with `reward.on_error=fail`, or none at all could.
    """
    world, rules, reward = groups.train.world_size, inputs.config.reward, inputs.reward
    assert reward is not None, "a reward model scores by itself"
    mine: list[float | Failure] = []
    for rollout in rollouts[groups.rank :: world]:
        response = inputs.tokenizer.decode(rollout.token_ids)
        judged = judge(reward, response, rollout.prompt, timeout=rules.timeout)
        if isinstance(judged, Failure) and rules.on_error == "fail":
            raise RewardError(f"{judged}\n(reward.on_error=drop leaves out the responses that cannot be scored)")
        mine.append(judged)
    gathered = groups.all_gather(mine, "all scores")
    results = [gathered[i % world][i // world] for i in range(len(rollouts))]
    failures = [result for result in results if isinstance(result, Failure)]
    if len(failures) == len(results):
        raise RewardError(f"none of {len(results)} responses could be scored; the first: {failures[0]}")
    if failures:
        say(f"{len(failures)} of {len(results)} responses could not be scored; the first: {failures[0].reason}")
    return rollouts.scored([None if isinstance(result, Failure) else result for result in results])

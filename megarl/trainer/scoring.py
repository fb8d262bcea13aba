"""Scores the rollouts, spread over all ranks."""

from __future__ import annotations

from dataclasses import replace

from megarl.data.tokenizer import Tokenizer
from megarl.parallel.groups import Groups
from megarl.rewards.registry import RewardFunction
from megarl.types import Rollouts


def score(rollouts: Rollouts, reward: RewardFunction, tokenizer: Tokenizer, groups: Groups) -> Rollouts:
    """The same rollouts with `rewards`; rank r scores every world-size-th completion, everybody gets all scores."""
    world = groups.train.world_size
    mine = [
        float(reward(tokenizer.decode(rollouts.completions[i].token_ids), rollouts.prompt_of(i).row))
        for i in range(groups.rank, len(rollouts.completions), world)
    ]
    gathered = groups.all_gather(mine, "all scores")
    rewards = tuple(gathered[i % world][i // world] for i in range(len(rollouts.completions)))
    return replace(rollouts, rewards=rewards)

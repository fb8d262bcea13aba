"""Draws prompts until enough of them can teach something: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.overlong import overlong_penalties
from megarl.config import Config
from megarl.trainer.scoring.scorer import Score
from megarl.trainer.session.run import Run
from megarl.types import Rollouts


def fill_batch(draw: Callable[[int], Rollouts], score: Score, run: Run) -> tuple[Rollouts, Rollouts]:
    """Return the groups to train on, and all groups that were drawn; both scored, the same on every rank.

    A prompt whose responses all have the same value of `filter_groups.metric` is left out. After
    `max_num_gen_batches` draws the batch is filled up with prompts that were left out, so that its size does not vary.

    Args:
        draw: the number of a draw, from 0 -> rollouts of the next prompts.
    """
    settings, batch_size = run.config.algorithm.filter_groups, run.config.data.train_batch_size
    drawn: list[Rollouts] = []
    useful: list[tuple[int, int]] = []  # (draw, prompt in it)
    others: list[tuple[int, int]] = []
    while len(useful) < batch_size and len(drawn) < settings.max_num_gen_batches:
        drawn.append(score(draw(len(drawn))))
        for prompt, values in enumerate(group_values(drawn[-1], run.config)):
            (useful if len(set(values)) > 1 else others).append((len(drawn) - 1, prompt))
    if len(useful) < batch_size:
        run.report.say(
            f"step {run.position.step}: {len(useful)} of {batch_size} prompts have responses that differ in "
            f"{settings.metric} after {len(drawn)} draws; the batch is filled up with others"
        )
    total = len(useful) + len(others)
    run.log("filter_groups", {"draws": float(len(drawn)), "kept": len(useful) / total})
    chosen = sorted((useful + others)[:batch_size])
    parts = [draws.of_groups([prompt for where, prompt in chosen if where == i]) for i, draws in enumerate(drawn)]
    return Rollouts.joined(parts), Rollouts.joined(drawn)


def group_values(rollouts: Rollouts, config: Config) -> list[list[float]]:
    """Return for each prompt the value of `filter_groups.metric` of each of its scored responses."""
    metric, rewards = config.algorithm.filter_groups.metric, rollouts.rewards
    values = list(rewards)
    if metric == "acc":
        values = [None if reward is None else float(reward >= 1.0) for reward in rewards]
    elif metric == "seq_reward":
        penalties = overlong_penalties(rollouts, config)
        values = [None if r is None else r + penalty for r, penalty in zip(rewards, penalties, strict=True)]
    return [[value for i in places if (value := values[i]) is not None] for places in rollouts.groups]

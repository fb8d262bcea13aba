"""Generates, scores and shows a step's rollouts, and lays them out as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from megarl.algorithms.overlong import overlong_penalties
from megarl.data.prompt_sampler import PromptSampler
from megarl.hybrid.generation import Generation
from megarl.phases import Phase
from megarl.rewards.results import RewardError
from megarl.rollout.replicas import Quota
from megarl.trainer.experience.carry_over import CarryOver
from megarl.trainer.experience.dynamic_sampling import fill_batch
from megarl.trainer.experience.scores import Scoring
from megarl.trainer.records.first_step import remarks_on
from megarl.trainer.records.score_metrics import part_metrics
from megarl.trainer.records.step_metrics import episode_metrics, response_metrics, reward_metrics, spread_metrics
from megarl.trainer.session.run import Run
from megarl.types import Batch, Rollout, Rollouts


def collect(
    run: Run,
    generation: Generation,
    sampler: PromptSampler,
    score: Scoring,
    *,
    greedy: bool = False,
    carry_over: CarryOver | None = None,
    everywhere: bool = True,
) -> Batch:
    """Generate and score responses to the next prompts; returns them as a batch.

    With `algorithm.filter_groups` functions score them while the engine is awake, so that more prompts can be drawn; a
    reward model's part is added to what is trained on.

    Args:
        greedy: generate and score a greedy response to each prompt too.
        carry_over: the responses that outlive a step, if any do.
        everywhere: every rank gets all tokens; else those of a replica's responses stay with its ranks.
    """
    inputs, config, step = run.inputs, run.config, run.position.step
    seed, n, sampling = config.data.seed, config.actor_rollout_ref.rollout.n, inputs.sampling(validation=False)
    scored: Any = dict(on_finished=run.on_finished, everywhere=False)

    def draw(number: int) -> Rollouts:
        prompts = [inputs.train_prompts[i] for i in sampler.next()]
        return generation.rollouts(prompts, n, sampling, seed=seed, round_=step, draw=number, **scored)

    def go_on(begun: Sequence[Rollout], quota: Quota) -> Rollouts:
        return generation.go_on(begun, sampling, version=step, quota=quota, **scored)

    best_guess = None
    with generation.phase(verify=run.checks_agreement):
        if config.algorithm.filter_groups.enable:
            rollouts, drawn = fill_batch(draw, score.functions, run)
        elif carry_over is not None:
            rollouts = drawn = carry_over.next_batch(sampler.next, go_on, step)
            run.log("carry_over", carry_over.metrics())
        else:
            rollouts = drawn = draw(0)
        if greedy:
            best = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, routed_experts=False)
            prompts = rollouts.prompts
            best_guess = generation.rollouts(prompts, 1, best, seed=seed, round_=step, everywhere=False)
    batch = batch_of_scored(run, score, rollouts, drawn, best_guess)
    return batch.everywhere() if everywhere else batch


def batch_of_scored(
    run: Run, score: Scoring, rollouts: Rollouts, drawn: Rollouts, best_guess: Rollouts | None = None
) -> Batch:
    """Score responses, show some, and return those to train on as a batch; tokens stay on the ranks that have them.

    Args:
        drawn: all responses that were generated. With `algorithm.filter_groups` they are scored by functions, and the
            rollouts are some of them; else they are the rollouts.
        best_guess: the greedy responses, one to each prompt.
    """
    with run.phase(Phase.REWARD):
        if not run.config.algorithm.filter_groups.enable:
            rollouts = drawn = score(rollouts)
        elif score.model is not None:
            rollouts = drawn = score.model(rollouts)
        details = {**part_metrics(drawn.responses()), **run.score_metrics()}
        if best_guess is not None:
            best_guess = score(best_guess)
            run.score_metrics()  # what is logged is of the samples
    _show(run, rollouts, drawn)
    run.log("reward", details)
    return _batch(run, rollouts, best_guess)


def comparable(rollouts: Rollouts, best_guess: Rollouts) -> Rollouts:
    """Return the rollouts without the scores of responses whose prompt's greedy response has none: they have no
    baseline.

    Args:
        best_guess: the greedy responses, one to each prompt.

    Raises:
        RewardError: none has both.
    """
    rewards = list(rollouts.rewards)
    for places, baseline in zip(rollouts.groups, best_guess.responses().rewards, strict=True):
        if baseline is None:
            for i in places:
                rewards[i] = None
    if all(reward is None for reward in rewards):
        raise RewardError("no prompt has a score for its greedy response and for a sampled one: there is no baseline")
    return rollouts.scored(rewards)


def _batch(run: Run, rollouts: Rollouts, best_guess: Rollouts | None) -> Batch:
    if best_guess is not None:
        rollouts = comparable(rollouts, best_guess)
    batch = rollouts.to_batch()
    assert batch.rewards is not None
    run.log("", {"tokens": float(batch.lengths.sum())})
    if run.config.reward.overlong_buffer.enable:
        penalties = torch.tensor(overlong_penalties(rollouts, run.config)) * (batch.response_lengths > 0)
        run.log("reward", {"overlong_penalty": float(penalties.mean())})
        batch = batch.with_(rewards=batch.rewards + penalties)
    if best_guess is not None:
        greedy = best_guess.responses().rewards
        run.log("reward", {"greedy": fmean(reward for reward in greedy if reward is not None)})
        baselines = torch.tensor([0.0 if reward is None else reward for reward in greedy])  # nothing reads those 0
        batch = batch.with_(greedy_rewards=baselines[batch.groups])
    return batch


def _show(run: Run, rollouts: Rollouts, drawn: Rollouts) -> None:
    """Show samples of what is trained on, and log numbers about all that was drawn."""
    run.show(rollouts)
    run.log("reward", reward_metrics(drawn.responses()))
    run.log("score", spread_metrics(drawn.responses()))
    run.log("response", response_metrics(drawn))
    run.log("episode", episode_metrics(drawn))
    if run.is_first_step:
        for remark in remarks_on(drawn, run.inputs):
            run.report.warn(f"step {run.position.step}: {remark}")

"""A step's rollouts: generated, scored, shown, and laid out as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megarl.data.sampler import PromptSampler
from megarl.hybrid.generation import Generation
from megarl.phases import Phase
from megarl.rollout.replicas import Quota
from megarl.trainer.experience.carry_over import CarryOver
from megarl.trainer.experience.dynamic_sampling import fill_batch
from megarl.trainer.experience.overlong import overlong_penalties
from megarl.trainer.experience.scoring import Score
from megarl.trainer.records.first_step import remarks_on
from megarl.trainer.records.step_metrics import episode_metrics, response_metrics, reward_metrics, spread_metrics
from megarl.trainer.session import Run
from megarl.types import Batch, Rollout, Rollouts


def collect(
    run: Run,
    generation: Generation,
    sampler: PromptSampler,
    score: Score,
    *,
    greedy: bool,
    carry_over: CarryOver | None = None,
) -> Batch:
    """Responses to the next prompts, with their rewards.

    With `algorithm.filter_groups` they are scored while the engine is awake, so that more prompts can be drawn.

    Args:
        greedy: generate and score a greedy response to each prompt too.
        carry_over: the responses that outlive a step, if any do.
    """
    inputs, config, step = run.inputs, run.config, run.position.step
    seed, n, sampling = config.data.seed, config.actor_rollout_ref.rollout.n, inputs.sampling(validation=False)

    def draw(number: int) -> Rollouts:
        prompts = [inputs.train_prompts[i] for i in sampler.next()]
        return generation.rollouts(
            prompts, n, sampling, seed=seed, round_=step, draw=number, on_finished=run.on_finished
        )

    def go_on(begun: Sequence[Rollout], quota: Quota) -> Rollouts:
        return generation.go_on(begun, sampling, version=step, quota=quota, on_finished=run.on_finished)

    best_guess = None
    with generation.phase(verify=run.checks_agreement):
        if config.algorithm.filter_groups.enable:
            rollouts, drawn = fill_batch(draw, score, run)
        elif carry_over is not None:
            rollouts = carry_over.next_batch(sampler.next, go_on, step)
            run.log("carry_over", carry_over.metrics())
        else:
            rollouts = draw(0)
        if greedy:
            best_guess = generation.rollouts(
                rollouts.prompts, 1, replace(sampling, temperature=0.0, top_p=1.0, top_k=-1), seed=seed, round_=step
            )
    with run.phase(Phase.REWARD):
        if not config.algorithm.filter_groups.enable:
            rollouts = drawn = score(rollouts)
        details = run.score_metrics()
        if best_guess is not None:
            best_guess = score(best_guess)
            run.score_metrics()  # what is logged is of the samples
    _show(run, rollouts, drawn)
    run.log("reward", details)
    return _batch(run, rollouts, best_guess)


def _batch(run: Run, rollouts: Rollouts, best_guess: Rollouts | None) -> Batch:
    batch = rollouts.to_batch()
    assert batch.rewards is not None
    run.log("", {"tokens": float(len(batch.tokens))})
    if run.config.reward.overlong_buffer.enable:
        penalties = torch.tensor(overlong_penalties(rollouts, run.config)) * (batch.response_lengths > 0)
        run.log("reward", {"overlong_penalty": float(penalties.mean())})
        batch = batch.with_(rewards=batch.rewards + penalties)
    if best_guess is not None:
        scores = torch.tensor([0.0 if reward is None else reward for reward in best_guess.responses().rewards])
        run.log("reward", {"greedy": float(scores.mean())})
        batch = batch.with_(greedy_rewards=scores[batch.groups])
    return batch


def _show(run: Run, rollouts: Rollouts, drawn: Rollouts) -> None:
    """What people look at: samples of what is trained on, and numbers about all that was drawn."""
    run.report.samples(run.row, rollouts)
    run.log("reward", reward_metrics(drawn.responses()))
    run.log("score", spread_metrics(drawn.responses()))
    run.log("response", response_metrics(drawn))
    run.log("episode", episode_metrics(drawn))
    if run.is_first_step:
        for remark in remarks_on(drawn, run.inputs):
            run.report.warn(f"step {run.position.step}: {remark}")

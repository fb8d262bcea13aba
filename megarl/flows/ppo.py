"""Runs PPO's family: generate, score, log-probabilities, values, advantages, updates; supervised warm-up before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.changed_batch import changed_by
from megarl.algorithms.declaration import Needs
from megarl.algorithms.group_scores import over_parts, per_response
from megarl.algorithms.kl import AdaptiveKlController
from megarl.algorithms.over_tokens import mean
from megarl.algorithms.returns import explained_variance, value_targets
from megarl.algorithms.rollout_correction import correct_rollouts, gap_metrics
from megarl.algorithms.value_loss import ValueLoss
from megarl.flows.policy_update import PolicyUpdate, per_update
from megarl.flows.sft import sft
from megarl.hybrid.generation import Generation
from megarl.own_code import check_runs, name_of
from megarl.phases import Phase
from megarl.roles.trained import Actor, Critic
from megarl.trainer.build import build_actor, build_critic, build_reference, build_teacher, prompt_sampler
from megarl.trainer.engine_check import check_finite
from megarl.trainer.experience.carry_over import CarryOver
from megarl.trainer.experience.collect import collect
from megarl.trainer.experience.evaluate import evaluate
from megarl.trainer.experience.scores import scorer
from megarl.trainer.needs import needs_of
from megarl.trainer.session.run import Run
from megarl.types import Batch

Stage = Callable[[Batch], Batch]
"""A part of a step: takes the step's batch, all of it on every rank, and returns it with columns changed or added."""


def flow(run: Run) -> None:
    """Run PPO's loop (arXiv 1707.06347, algorithm 1) with the configuration's roles, advantages and loss."""
    ppo(run)


def ppo(run: Run, stage: Stage | None = None) -> None:
    """Run PPO's loop, with a stage of your own in each step.

    Args:
        stage: called before the advantages are computed, when rewards, log-probabilities and values are there. Models
            that it uses join the run before.
    """
    if stage is not None:
        check_runs(stage, f"the stage {name_of(stage)}")
    config, rollout = run.config, run.config.actor_rollout_ref.rollout
    needs = needs_of(config) | Needs(old_logp=stage is not None)
    actor, generation = _warm_actor(run)
    reference = run.add("reference", build_reference(config, actor)) if needs.reference else None
    critic = run.add("critic", build_critic(run, actor)) if needs.critic else None
    teacher = run.add("teacher", build_teacher(run)) if needs.teacher else None
    update, score, kl = PolicyUpdate(run, actor, needs), scorer(run), _kl_controller(run)
    sampler = run.add("sampler", prompt_sampler(run.inputs))
    carry_over = run.add("carry_over", CarryOver.of(run.inputs, run.world.rank)) if rollout.carry_over.enable else None
    held_out = partial(evaluate, run, generation, score) if run.inputs.val_prompts else None

    for step in run.steps("rl", run.inputs.total_steps, before=0, validate=held_out):
        batch = collect(run, generation, sampler, score, greedy=needs.greedy, carry_over=carry_over, everywhere=False)
        check_finite(batch, config, step)
        plan = actor.plan(batch, per_update(batch, config.actor_rollout_ref.actor.ppo_mini_batch_size, config))
        batch = update.old_log_probs(batch.held_by(plan.owners), plan)
        if reference is not None:
            with run.phase(Phase.REF):
                batch = batch.with_(ref_logp=reference.log_probs(batch, plan))
        if teacher is not None:
            with run.phase(Phase.TEACHER):
                batch = batch.with_(teacher_logp=teacher.log_probs(batch, teacher.plan(batch)))
        if critic is not None:
            with run.phase(Phase.VALUES):
                batch = batch.with_(values=critic.values(batch, critic.plan(batch)))
        if stage is not None:
            batch = changed_by(stage, batch, f"the stage {name_of(stage)}", compare=run.checks_agreement)
        batch = correct_rollouts(batch, config.algorithm.rollout_correction)
        batch = compute_advantages(batch, config.algorithm, kl.coefficient, run.checks_agreement)
        run.check_agreement(batch)
        if critic is not None:
            with run.phase(Phase.UPDATE_CRITIC):
                update_critic(run, critic, batch)
        batch = update.optimize(batch, plan)
        _record(run, batch, kl)


def _warm_actor(run: Run) -> tuple[Actor, Generation]:
    """Build the actor and its engine, and train the actor on `warmup.train_files`, if there is a warm-up."""
    config, optim = run.config, run.config.actor_rollout_ref.actor.optim
    warmup, steps = config.warmup, config.warmup.total_training_steps
    first, span = (warmup.optim, steps) if steps else (optim, run.inputs.optimizer_steps)
    actor = run.add("actor", build_actor(run.inputs, run.groups, optim=first, total_steps=span, empty=run.resumes))
    generation = run.generation(actor)
    sft(run, actor, "warmup", total=steps, batch_size=warmup.train_batch_size, before=-steps - 1)
    if steps:
        actor.restart_optimizer(optim, run.inputs.optimizer_steps)
    return actor, generation


def _kl_controller(run: Run) -> AdaptiveKlController:
    control = run.config.algorithm.kl_ctrl
    kl = AdaptiveKlController(control.kl_coef, control.target_kl, control.horizon)
    if control.type == "adaptive":  # a fixed one is what the configuration says, also where a run goes on
        run.add("kl_coef", kl)
    return kl


def update_critic(run: Run, critic: Critic, batch: Batch) -> None:
    """Take the critic's optimizer steps towards the batch's returns."""
    config, settings = run.config, run.config.critic
    lam = config.algorithm.lam if settings.lam is None else settings.lam
    batch = batch.with_(returns=value_targets(batch, gamma=config.algorithm.gamma, lam=lam))
    run.log("critic", {"explained_variance": explained_variance(batch)})
    plan = critic.plan(batch, per_update(batch, config.critic_mini_batch_size, config))
    batch = batch.held_by(plan.owners, ("tokens", "response_mask", "values", "returns", "importance"))
    loss = ValueLoss(cliprange=settings.cliprange_value)
    for mini_batch in plan.mini_batches * settings.ppo_epochs:
        weights = token_weights(batch, mini_batch.sequences, settings.loss_agg_mode, config.data.max_response_length)
        run.log("critic", critic.update(batch, mini_batch, loss, weights))


def _record(run: Run, batch: Batch, kl: AdaptiveKlController) -> None:
    """Log what a step's batch says of engine, teacher and reference, and adapt the KL coefficient."""
    run.log("rollout", gap_metrics(batch))
    run.trained_on(batch)
    if batch.old_logp is not None and batch.teacher_logp is not None:
        gap = batch.trained(batch.old_logp - batch.teacher_logp)
        run.log("teacher", {"kl": mean(batch, gap)})
    if batch.kl_in_reward is not None:
        scored = per_response(batch, over_parts(batch, batch.kl_in_reward))
        run.log("reward", {"kl": float(scored.mean()), "kl_coef": kl.coefficient})
        if run.config.algorithm.kl_ctrl.type == "adaptive":
            kl.update(float(scored.mean()), len(scored))

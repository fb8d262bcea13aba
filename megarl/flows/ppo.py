"""The PPO family: generate, score, log-probabilities, values, advantages, updates; supervised warm-up before it."""

from __future__ import annotations

from functools import partial

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.kl import AdaptiveKlController
from megarl.algorithms.loss import Loss
from megarl.algorithms.returns import explained_variance, value_targets
from megarl.algorithms.rollout_correction import correct_rollouts, gap_metrics, without_truncated
from megarl.algorithms.value_loss import ValueLoss
from megarl.config import Config
from megarl.flows.sft import sft
from megarl.phases import Phase
from megarl.roles.passes import StepPlan
from megarl.roles.trained import Actor, Critic
from megarl.trainer.build import (
    build_actor,
    build_critic,
    build_reference,
    build_teacher,
    policy_loss,
    prompt_sampler,
)
from megarl.trainer.engine_check import check_finite, check_gap
from megarl.trainer.experience.carry_over import CarryOver
from megarl.trainer.experience.collect import collect
from megarl.trainer.experience.evaluate import evaluate
from megarl.trainer.experience.judging import scorer
from megarl.trainer.needs import needs_of, one_forward_pass
from megarl.trainer.session import Run
from megarl.types import Batch


def flow(run: Run) -> None:
    """PPO's loop (arXiv 1707.06347, algorithm 1) with the configuration's advantages and loss."""
    inputs, config = run.inputs, run.config
    roles, warmup, algorithm = config.actor_rollout_ref, config.warmup, config.algorithm
    needs, warming = needs_of(config), warmup.total_training_steps
    carries = roles.rollout.carry_over.enable

    optim, span = (warmup.optim, warming) if warming else (roles.actor.optim, inputs.optimizer_steps)
    actor = run.add("actor", build_actor(inputs, run.groups, optim=optim, total_steps=span, empty=run.resumes))
    generation = run.generation(actor)
    sft(run, actor, "warmup", total=warming, batch_size=warmup.train_batch_size, before=-warming - 1)
    if warming:
        actor.restart_optimizer(roles.actor.optim, inputs.optimizer_steps)
    reference = run.add("reference", build_reference(config, actor)) if needs.reference else None
    critic = run.add("critic", build_critic(run, actor)) if needs.critic else None
    teacher = run.add("teacher", build_teacher(run)) if needs.teacher else None
    score, loss = scorer(run), policy_loss(config, reference=needs.reference)
    control = algorithm.kl_ctrl
    kl = AdaptiveKlController(control.kl_coef, control.target_kl, control.horizon)
    if control.type == "adaptive":  # a fixed one is what the configuration says, also where a run goes on
        run.add("kl_coef", kl)
    sampler = run.add("sampler", prompt_sampler(inputs))
    carry_over = run.add("carry_over", CarryOver(config, inputs.train_prompts)) if carries else None
    held_out = partial(evaluate, run, generation, score) if inputs.val_prompts else None

    for step in run.steps("rl", inputs.total_steps, before=0, validate=held_out):
        batch = collect(run, generation, sampler, score, greedy=needs.greedy, carry_over=carry_over)
        check_finite(batch, config, step)
        plan = actor.plan(batch, per_update(batch, roles.actor.ppo_mini_batch_size, config))
        trains = step > config.trainer.critic_warmup
        at_once = trains and one_forward_pass(config, needs)
        if not at_once:
            with run.phase(Phase.LOG_PROBS):
                batch = batch.with_(old_logp=actor.log_probs(batch, plan))
            check_gap(batch, config, step)
        if reference is not None:
            with run.phase(Phase.REF):
                batch = batch.with_(ref_logp=reference.log_probs(batch, plan))
        if teacher is not None:
            with run.phase(Phase.TEACHER):
                batch = batch.with_(teacher_logp=teacher.log_probs(batch, teacher.plan(batch)))
        if critic is not None:
            with run.phase(Phase.VALUES):
                batch = batch.with_(values=critic.values(batch, critic.plan(batch)))
        batch = correct_rollouts(batch, algorithm.rollout_correction)
        batch = compute_advantages(batch, algorithm, kl.coefficient)
        run.check_agreement(batch)
        run.pace.passed(batch, (0 if at_once else 1) + (3 * roles.actor.ppo_epochs if trains else 0))

        if critic is not None:
            with run.phase(Phase.UPDATE_CRITIC):
                update_critic(run, critic, batch)
        if trains:
            with run.phase(Phase.UPDATE):
                batch = update_actor(run, actor, batch, plan, loss, at_once=at_once)
        if at_once:
            check_gap(batch, config, step)
        run.log("rollout", gap_metrics(batch))
        run.report.trained_on(batch)
        if batch.old_logp is not None and batch.teacher_logp is not None:
            gap = (batch.old_logp - batch.teacher_logp)[batch.response_mask]
            run.log("teacher", {"kl": float(gap.mean())})
        if batch.kl_in_reward is not None:
            scored = batch.kl_in_reward[batch.response_lengths > 0]
            run.log("reward", {"kl": float(scored.mean()), "kl_coef": kl.coefficient})
            if control.type == "adaptive":
                kl.update(float(scored.mean()), len(scored))


def update_actor(run: Run, actor: Actor, batch: Batch, plan: StepPlan, loss: Loss, *, at_once: bool) -> Batch:
    """The optimizer steps of a batch.

    Args:
        at_once: there is one of them, whose forward pass gives `old_logp`.

    Returns:
        the batch with `old_logp`.
    """
    settings, longest = run.config.actor_rollout_ref.actor, run.config.data.max_response_length
    trained = without_truncated(batch) if run.config.algorithm.overlong_filtering else batch
    for mini_batch in plan.mini_batches * settings.ppo_epochs:
        weights = token_weights(trained, mini_batch.sequences, settings.loss_agg_mode, longest)
        if at_once:
            metrics, logp = actor.update_with_outputs(trained, mini_batch, loss, weights)
            batch = batch.with_(old_logp=logp)
        else:
            metrics = actor.update(trained, mini_batch, loss, weights)
        run.log("actor", metrics)
    return batch


def per_update(batch: Batch, prompts: int, config: Config) -> int:
    """Sequences of an optimizer step that is to have so many prompts: `rollout.n` to each, unless a conversation of an
    agent became several. There are as many optimizer steps then."""
    return -(-len(batch) // (config.data.train_batch_size // prompts))


def update_critic(run: Run, critic: Critic, batch: Batch) -> None:
    """The critic's optimizer steps towards the batch's returns."""
    config, settings = run.config, run.config.critic
    lam = config.algorithm.lam if settings.lam is None else settings.lam
    batch = batch.with_(returns=value_targets(batch, gamma=config.algorithm.gamma, lam=lam))
    run.log("critic", {"explained_variance": explained_variance(batch)})
    plan = critic.plan(batch, per_update(batch, config.critic_mini_batch_size, config))
    loss = ValueLoss(cliprange=settings.cliprange_value)
    for mini_batch in plan.mini_batches * settings.ppo_epochs:
        weights = token_weights(batch, mini_batch.sequences, settings.loss_agg_mode, config.data.max_response_length)
        run.log("critic", critic.update(batch, mini_batch, loss, weights))

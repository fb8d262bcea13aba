"""The PPO family: generate, score, log-probabilities, advantages, update; a supervised warm-up may come before."""

from __future__ import annotations

from functools import partial

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.kl import AdaptiveKlController
from megarl.algorithms.rollout_correction import correct_rollouts, gap_metrics
from megarl.flows.sft import sft
from megarl.phases import Phase
from megarl.trainer.build import build_actor, build_reference, policy_loss, prompt_sampler
from megarl.trainer.engine_check import check_gap
from megarl.trainer.evaluate import evaluate
from megarl.trainer.first_step import remarks_on
from megarl.trainer.scoring import score
from megarl.trainer.session import Run
from megarl.trainer.step_metrics import response_metrics, reward_metrics
from megarl.types import Rollouts


def flow(run: Run) -> None:
    """PPO's loop (arXiv 1707.06347, algorithm 1) with the configuration's advantages and loss."""
    inputs, config = run.inputs, run.config
    data, roles, warmup = config.data, config.actor_rollout_ref, config.warmup
    warming, control = warmup.total_training_steps, config.algorithm.kl_ctrl
    loss, sampling = policy_loss(config), inputs.sampling(validation=False)
    mini_batch_size = roles.actor.ppo_mini_batch_size * roles.rollout.n

    optim, span = (warmup.optim, warming) if warming else (roles.actor.optim, inputs.optimizer_steps)
    actor = run.add("actor", build_actor(inputs, run.groups, optim=optim, total_steps=span, empty=run.resumes))
    generation = run.generation(actor)
    sft(run, actor, "warmup", total=warming, batch_size=warmup.train_batch_size, before=-warming - 1)
    if warming:
        actor.restart_optimizer(roles.actor.optim, inputs.optimizer_steps)
    reference = run.add("reference", build_reference(config, actor)) if config.needs_reference else None
    kl = run.add("kl_coef", AdaptiveKlController(control.kl_coef, control.target_kl, control.horizon))
    sampler = run.add("sampler", prompt_sampler(inputs))
    held_out = partial(evaluate, run, generation) if inputs.val_prompts else None

    for step in run.steps("rl", inputs.total_steps, before=0, validate=held_out):
        with generation.phase(verify=run.checks_agreement):
            prompts = [inputs.train_prompts[i] for i in sampler.next()]
            rollouts = generation.rollouts(prompts, roles.rollout.n, sampling, seed=data.seed, round_=step)
        with run.phase(Phase.REWARD):
            rollouts = score(rollouts, inputs, run.groups, run.report.say)
        _show(run, rollouts)

        batch = rollouts.to_batch()
        plan = run.plan(batch, mini_batch_size)
        with run.phase(Phase.LOG_PROBS):
            batch = batch.with_(old_logp=actor.log_probs(batch, plan.micro_batches))
        check_gap(batch, config, step)
        if reference is not None:
            with run.phase(Phase.REF):
                batch = batch.with_(ref_logp=reference.log_probs(batch, plan.micro_batches))
        batch = correct_rollouts(batch, config.algorithm.rollout_correction)
        batch = compute_advantages(batch, config.algorithm, kl.coefficient)
        run.check_agreement(batch)
        run.log("rollout", gap_metrics(batch))
        run.log("", {"tokens": float(len(batch.tokens))})

        with run.phase(Phase.UPDATE):
            for mini_batch in plan.mini_batches * roles.actor.ppo_epochs:
                mode = roles.actor.loss_agg_mode
                weights = token_weights(batch, mini_batch.sequences, mode, data.max_response_length)
                run.log("actor", actor.update(batch, mini_batch, loss, weights))
        if batch.kl_in_reward is not None:
            scored = batch.kl_in_reward[batch.response_lengths > 0]
            run.log("reward", {"kl": float(scored.mean())})
            if control.type == "adaptive":
                kl.update(float(scored.mean()), len(scored))


def _show(run: Run, rollouts: Rollouts) -> None:
    """What people look at of a step's rollouts."""
    run.report.samples(run.position.step, rollouts)
    run.log("reward", reward_metrics(rollouts))
    run.log("response", response_metrics(rollouts))
    if run.is_first_step:
        for remark in remarks_on(rollouts, run.inputs):
            run.report.warn(f"step {run.position.step}: {remark}")

"""A user's flow with columns of its own: a policy update that reads them, then DPO on the best and the worst answer."""

import megarl


@megarl.about("score - mean of its group, kept per response and per token", needs=megarl.Needs(samples=2))
def centred(batch: megarl.Batch, config: object) -> megarl.Batch:
    """Advantages, and copies of them in columns of the batch's."""
    advantages = megarl.at_tokens(batch, megarl.group_scores(batch).centred())
    per_response = advantages[batch.cu_seqlens[1:] - 1]
    return batch.with_(advantages=advantages).with_columns(of_response=per_response, of_token=advantages.clone())


class PolicyGradient:
    """The policy gradient with the column of responses as advantages."""

    columns = ("old_logp", "advantages", "of_response", "of_token")

    def __call__(self, x: megarl.LossInput) -> megarl.LossOutput:
        wanted, log_ratios = x.columns["advantages"], megarl.log_ratio(x)
        output = megarl.policy_output(x, x.weights.dot(-x.columns["of_response"] * log_ratios.exp()), log_ratios)
        gaps = {name: (x.columns[name] - wanted).abs().sum() for name in ("of_response", "of_token")}
        metrics = {f"gap_{name}": megarl.Metric(value=gap, reduce="max") for name, gap in gaps.items()}
        size = megarl.Metric(value=wanted.abs().sum(), reduce="max")
        return megarl.LossOutput(loss=output.loss, metrics={**output.metrics, **metrics, "size": size})


def flow(run: megarl.Run) -> None:
    inputs, config = run.inputs, run.config
    optim = config.actor_rollout_ref.actor.optim
    actor = run.add("actor", megarl.build_actor(inputs, run.groups, optim=optim, total_steps=2))
    reference = run.add("reference", megarl.build_reference(config, actor))
    generation, prompts = run.generation(actor), run.add("prompts", megarl.prompt_sampler(inputs))
    score = megarl.scorer(run)
    for _ in run.steps("rl", 1):
        batch = megarl.collect(run, generation, prompts, score, greedy=False)
        plan = actor.plan(batch)
        batch = batch.with_(old_logp=actor.log_probs(batch, plan))
        batch = megarl.compute_advantages(batch, config.algorithm, 0.0)
        run.log("columns", actor.update(batch, *plan.mini_batches, PolicyGradient()))
        run.report.trained_on(batch)
    for step in run.steps("dpo", 1):
        chosen = [inputs.train_prompts[i] for i in prompts.next()]
        with generation.phase():
            answers = generation.rollouts(chosen, 4, inputs.sampling(validation=False), seed=1, round_=step)
        answers = score(answers)
        run.report.samples(run.row, answers)
        pairs = [pick(places, key=answers.rewards.__getitem__) for places in answers.groups for pick in (max, min)]
        batch = answers.of(answers[i] for i in pairs).to_batch()
        plan = actor.plan(batch, together=2)
        batch = batch.with_(ref_logp=reference.log_probs(batch, plan))
        run.log("dpo", actor.update(batch, *plan.mini_batches, megarl.Dpo(beta=0.1)))

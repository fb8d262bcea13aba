"""A user's flow: supervised training, a reward model, GRPO with it, then fine-tuning on the best of n."""

from functools import partial

from torch.nn.functional import logsigmoid

import megarl


def verdict(x: megarl.LossInput) -> megarl.LossOutput:  # logistic regression on what the verifier says
    return megarl.LossOutput(loss=-x.weights.dot(logsigmoid(x.output * (2 * x.columns["rewards"] - 1))))


verdict.columns = ("rewards",)


def flow(run: megarl.Run) -> None:
    inputs, config, roles = run.inputs, run.config, run.config.actor_rollout_ref
    actor = run.add("actor", megarl.build_actor(inputs, run.groups, optim=roles.actor.optim, total_steps=9))
    generation, prompts = run.generation(actor), run.add("prompts", megarl.prompt_sampler(inputs))

    def sample(round_: int) -> megarl.Rollouts:
        chosen = [inputs.train_prompts[i] for i in prompts.next()]
        with generation.phase():
            made = generation.rollouts(chosen, 4, inputs.sampling(validation=False), seed=1, round_=round_)
        return run.score(made)

    megarl.sft(run, actor, "sft", total=2, batch_size=20)
    own = {"model": roles.model, "megatron": roles.actor.megatron, "batching": roles.actor, "optim": roles.actor.optim}
    judge = megarl.RewardModel(inputs.arch, run.groups, total_steps=2, initial=lambda it: it.copy_from(actor), **own)
    run.add("judge", judge)
    for step in run.steps("judge", 2):
        batch = sample(step).to_batch()
        run.log("judge", judge.update(batch, *judge.plan(batch).mini_batches, verdict))
    loss = megarl.policy_loss(config)
    for step in run.steps("rl", 3, validate=partial(megarl.evaluate, run, generation)):
        batch = sample(10 + step).to_batch()
        plan = actor.plan(batch, sequences=32)
        scores, logp = judge.scores(batch, judge.plan(batch)), actor.log_probs(batch, plan)
        batch = megarl.compute_advantages(batch.with_(rewards=scores, old_logp=logp), config.algorithm, 0.0)
        for mini_batch in plan.mini_batches:
            run.log("actor", actor.update(batch, mini_batch, loss))
    for step in run.steps("best", 2):
        made = sample(20 + step)
        best = [max(places, key=made.rewards.__getitem__) for places in made.groups]
        batch = made.of(made[i] for i in best).to_batch()
        run.log("best", actor.update(batch, *actor.plan(batch).mini_batches, megarl.cross_entropy))

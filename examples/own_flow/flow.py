"""A flow of one's own: rejection sampling. Answer, keep the best answer to each prompt, learn it, and again."""

from functools import partial

import megarl


def flow(run: megarl.Run) -> None:
    inputs, config = run.inputs, run.config
    roles, warmup = config.actor_rollout_ref, config.warmup
    warming, steps = warmup.total_training_steps, config.trainer.total_training_steps
    actor = run.add("actor", megarl.build_actor(inputs, run.groups, optim=warmup.optim, total_steps=warming))
    generation, prompts = run.generation(actor), run.add("prompts", megarl.prompt_sampler(inputs))
    megarl.sft(run, actor, "warmup", total=warming, batch_size=warmup.train_batch_size)
    actor.restart_optimizer(roles.actor.optim, steps)
    for step in run.steps("best-of-n", steps, validate=partial(megarl.evaluate, run, generation)):
        chosen = [inputs.train_prompts[i] for i in prompts.next()]
        with generation.phase():
            made = generation.rollouts(chosen, roles.rollout.n, inputs.sampling(validation=False), seed=1, round_=step)
        made = run.score(made)
        best = [max(places, key=made.rewards.__getitem__) for places in made.groups]
        run.log("reward", {"best": sum(made.rewards[i] for i in best) / len(best)})
        kept = made.of(made[i] for i in best if made.rewards[i] >= 1)  # right ones
        if not len(kept):
            continue
        batch = kept.to_batch()
        run.log("actor", actor.update(batch, *actor.plan(batch).mini_batches, megarl.cross_entropy))

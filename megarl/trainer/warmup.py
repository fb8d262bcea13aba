"""The supervised warm-up: cross-entropy on reference answers, through the same actor, packing and loss weights."""

from __future__ import annotations

from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.policy_loss import supervised_loss
from megarl.data.sampler import PromptSampler
from megarl.roles.actor import Actor
from megarl.trainer.inputs import Inputs
from megarl.trainer.micro_batches import plan_micro_batches
from megarl.trainer.report import Report
from megarl.types import batch_of


def warm_up(inputs: Inputs, actor: Actor, report: Report) -> None:
    """Train the actor for `warmup.total_training_steps` optimizer steps."""
    config, warmup = inputs.config, inputs.config.warmup
    examples = inputs.demonstrations
    sampler = PromptSampler(len(examples), warmup.train_batch_size, True, config.data.seed)
    actor.start_optimizer(warmup.optim, warmup.total_training_steps)
    with report.phase("warm-up", warmup.total_training_steps):
        for step in range(1, warmup.total_training_steps + 1):
            chosen = [examples[i] for i in sampler.next()]
            batch = batch_of([e.prompt_ids for e in chosen], [e.response_ids for e in chosen], range(len(chosen)))
            (mini_batch,) = plan_micro_batches(batch, config, actor.groups, whole=True).mini_batches
            weights = token_weights(batch, mini_batch.sequences, "token-mean", config.data.max_response_length)
            metrics = actor.update(batch, mini_batch.micro_batches, weights, supervised_loss, temperature=1.0)
            report.warmup_step(step, {"warmup/step": step, "warmup/loss": metrics["actor/loss"]})

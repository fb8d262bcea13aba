"""Does the actor's part of a step: log-probabilities of a batch, then the optimizer's steps on it."""

from __future__ import annotations

from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.declaration import Needs
from megarl.algorithms.rollout_correction import without_truncated
from megarl.config import Config
from megarl.phases import Phase
from megarl.roles.passes import StepPlan
from megarl.roles.trained import Actor
from megarl.trainer.build import policy_loss
from megarl.trainer.engine_check import check_gap
from megarl.trainer.needs import one_forward_pass
from megarl.trainer.session.run import Run
from megarl.types import Batch


class PolicyUpdate:
    """Computes `old_logp`, and trains the actor in all steps after `trainer.critic_warmup`.

    Where a batch has one optimizer step, `old_logp` can come from the forward pass of that step (`one_forward_pass`):
    `old_log_probs` computes nothing then, and `optimize` adds them.
    """

    def __init__(self, run: Run, actor: Actor, needs: Needs) -> None:
        self._run, self._actor = run, actor
        self._loss = policy_loss(run.config, reference=needs.reference)
        self._one_pass = one_forward_pass(run.config, needs)

    @property
    def _trains(self) -> bool:
        return self._run.position.step > self._run.config.trainer.critic_warmup

    def old_log_probs(self, batch: Batch, plan: StepPlan) -> Batch:
        """Return the batch with `old_logp`, unless `optimize` is to add them."""
        if self._trains and self._one_pass:
            return batch
        with self._run.phase(Phase.LOG_PROBS):
            batch = batch.with_(old_logp=self._actor.log_probs(batch, plan))
        check_gap(batch, self._run.config, self._run.position.step)
        return batch

    def optimize(self, batch: Batch, plan: StepPlan) -> Batch:
        """Take the optimizer steps of the batch, if the actor trains now; returns the batch with `old_logp`."""
        run, settings = self._run, self._run.config.actor_rollout_ref.actor
        passes = (3 * settings.ppo_epochs if self._trains else 0) + (batch.old_logp is not None)
        run.records.pace.passed(batch, passes, plan)
        if not self._trains:
            return batch
        trained = without_truncated(batch) if run.config.algorithm.overlong_filtering else batch
        with run.phase(Phase.UPDATE):
            for mini_batch in plan.mini_batches * settings.ppo_epochs:
                weights = token_weights(
                    trained, mini_batch.sequences, settings.loss_agg_mode, run.config.data.max_response_length
                )
                if batch.old_logp is not None:
                    metrics = self._actor.update(trained, mini_batch, self._loss, weights)
                else:  # there is no second mini-batch
                    metrics, logp = self._actor.update_with_outputs(trained, mini_batch, self._loss, weights)
                    batch = batch.with_(old_logp=logp)
                    check_gap(batch, run.config, run.position.step)
                run.log("actor", metrics)
                run.log("perf", {"gradient_sync_s": self._actor.gradient_sync.seconds})
        return batch


def per_update(batch: Batch, prompts: int, config: Config) -> int:
    """Count the sequences of the batch for an optimizer step on so many prompts.

    They are `rollout.n` for each prompt, unless a conversation of an agent became several sequences: there are as many
    optimizer steps then.
    """
    return -(-len(batch) // (config.data.train_batch_size // prompts))

"""Learning from answers that the data holds: a batch of examples, an update, over and over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.algorithms.loss import Loss, Metric
from megarl.data.example_batch import batch_of_examples
from megarl.data.examples import Example
from megarl.phases import Phase
from megarl.roles.passes import Passes
from megarl.roles.trained import Actor, TrainedModel
from megarl.trainer.build import build_actor, prompt_sampler
from megarl.trainer.session.run import Run
from megarl.types import Batch

Columns = Callable[[Batch, Passes], Batch]
"""The batch with what the loss wants of other models, by these passes of this rank."""


def policy(run: Run) -> Actor:
    """Build the actor, which joins the run; its learning-rate schedule spans all steps."""
    optim, total = run.config.actor_rollout_ref.actor.optim, run.inputs.total_steps
    return run.add("actor", build_actor(run.inputs, run.groups, optim=optim, total_steps=total, empty=run.resumes))


def learn(run: Run, model: TrainedModel, loss: Loss, columns: Columns | None = None) -> None:
    """Run the loop "train": one update for each batch of training examples, validated on all held-out examples."""
    inputs, sampler = run.inputs, run.add("sampler", prompt_sampler(run.inputs))

    def validate() -> dict[str, float]:
        metrics = held_out(run, model, loss, columns)
        return {f"val/{name}": value for name, value in metrics.items()}

    for _ in run.steps("train", inputs.total_steps, validate=validate if inputs.val_examples else None):
        examples = [inputs.train_examples[i] for i in sampler.next()]
        run.log("train", update_on(run, model, loss, examples, columns))


def update_on(
    run: Run, model: TrainedModel, loss: Loss, examples: Sequence[Example], columns: Columns | None = None
) -> Mapping[str, Metric]:
    """Take one optimizer step on all of the examples; returns its metrics."""
    batch = batch_of_examples(examples)
    plan = model.plan(batch, together=len(examples[0].sequences))
    if columns is not None:
        batch = columns(batch, plan)
    run.check_agreement(batch)
    run.log("", {"tokens": float(batch.lengths.sum())})
    (mini_batch,) = plan.mini_batches
    run.records.pace.passed(batch, 3, plan.saved)
    with run.phase(Phase.UPDATE):
        return model.update(batch, mini_batch, loss)


def held_out(run: Run, model: TrainedModel, loss: Loss, columns: Columns | None = None) -> dict[str, float]:
    """Compute the loss and its metrics over all of `data.val_files`, without gradients."""
    examples = list(run.inputs.val_examples)
    batch, together = batch_of_examples(examples), len(examples[0].sequences)
    plan = model.plan(batch, together * run.config.data.train_batch_size, together=together)
    if columns is not None:
        batch = columns(batch, plan)
    metrics = model.evaluate(batch, plan, loss)
    if loss is cross_entropy:
        metrics["perplexity"] = float(torch.tensor(metrics["loss"]).exp())
    return metrics

"""Trains on answers that the data holds: a batch of examples, an update, over and over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.algorithms.loss import Loss, Metric
from megarl.phases import Phase
from megarl.roles.passes import Passes
from megarl.roles.trained import Actor, TrainedModel
from megarl.trainer.build import build_actor, prompt_sampler
from megarl.trainer.example_reader import ExampleReader
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
    inputs = run.inputs
    reader, held_out_reader = (ExampleReader(rows, run.world) for rows in (inputs.train_examples, inputs.val_examples))
    sampler = run.add("sampler", prompt_sampler(inputs, fits=reader.fits))

    def validate() -> dict[str, float]:
        batch = held_out_reader.batch(range(len(inputs.val_examples)))
        metrics = evaluate_on(run, model, loss, batch, columns)
        return {f"val/{name}": value for name, value in metrics.items()}

    for _ in run.steps("train", inputs.total_steps, validate=validate if inputs.val_examples else None):
        run.log("train", update_on(run, model, loss, reader.batch(sampler.next()), columns))


def update_on(
    run: Run, model: TrainedModel, loss: Loss, batch: Batch, columns: Columns | None = None
) -> Mapping[str, Metric]:
    """Take one optimizer step on a batch of examples; returns its metrics."""
    plan = model.plan(batch, together=_sequences_of_each(batch))
    batch = batch.held_by(plan.owners)
    if columns is not None:
        batch = columns(batch, plan)
    run.check_agreement(batch)
    run.log("", {"tokens": float(batch.lengths.sum())})
    (mini_batch,) = plan.mini_batches
    run.records.pace.passed(batch, 3, plan)
    with run.phase(Phase.UPDATE):
        return model.update(batch, mini_batch, loss)


def evaluate_on(
    run: Run, model: TrainedModel, loss: Loss, batch: Batch, columns: Columns | None = None
) -> dict[str, float]:
    """Compute the loss and its metrics over a batch of examples, without gradients."""
    together = _sequences_of_each(batch)
    plan = model.plan(batch, together * run.config.data.train_batch_size, together=together)
    batch = batch.held_by(plan.owners)
    if columns is not None:
        batch = columns(batch, plan)
    metrics = model.evaluate(batch, plan, loss)
    if loss is cross_entropy:
        metrics["perplexity"] = float(torch.tensor(metrics["loss"]).exp())
    return metrics


def _sequences_of_each(batch: Batch) -> int:
    """Count the sequences of an example: 2 of a pair."""
    return len(batch) // (int(batch.groups[-1]) + 1)

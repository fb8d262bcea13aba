"""Trains a model on demonstrations: supervised training, with cross-entropy."""

from __future__ import annotations

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.data.prompt_sampler import PromptSampler
from megarl.flows.learn import learn, policy, update_on
from megarl.roles.trained import Actor
from megarl.trainer.example_reader import ExampleReader
from megarl.trainer.session.run import Run
from megarl.trainer.stopped import RunRefused


def flow(run: Run) -> None:
    """Train the actor on demonstrations. Each learnt token of a batch weighs the same, whichever answer it is in."""
    learn(run, policy(run), cross_entropy)


def sft(run: Run, actor: Actor, loop: str, *, total: int, batch_size: int, before: int | None = None) -> None:
    """Train the actor for `total` optimizer steps on the run's demonstrations, as a loop of another flow.

    Args:
        loop, before: see `Run.steps`.
        batch_size: examples per step, over all ranks.

    Raises:
        RunRefused: on every rank, if the run has fewer demonstrations than a step takes.
    """
    examples = run.inputs.demonstrations
    if total and len(examples) < batch_size:
        loaded = f"{len(examples)} demonstrations are loaded" if examples else "no demonstrations are loaded"
        raise RunRefused(
            f"the loop '{loop}' takes {batch_size} demonstrations a step, and {loaded}: set warmup.train_files, and "
            "warmup.total_training_steps to 1 or more"
        )
    seed = run.config.data.seed
    allow = {"warmup", *run.config.trainer.resume_allow}  # the start of the run has compared the warm-ups
    called = {"n_rows": ("demonstrations", "warmup"), "batch_size": ("warmup.train_batch_size", "warmup")}
    reader = ExampleReader(examples, run.world)
    if total:
        sampler = PromptSampler(len(examples), batch_size, True, seed, allow=allow, fits=reader.fits, called=called)
        run.add(f"{loop}_sampler", sampler)
    for _ in run.steps(loop, total, before=before):
        run.log(loop, update_on(run, actor, cross_entropy, reader.batch(sampler.next())))

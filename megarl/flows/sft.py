"""Supervised training: cross-entropy on demonstrations."""

from __future__ import annotations

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.data.sampler import PromptSampler
from megarl.flows.learn import learn, policy, update_on
from megarl.roles.trained import Actor
from megarl.trainer.session import Run


def flow(run: Run) -> None:
    """Each learnt token of a batch weighs the same, whoever's answer it is in."""
    learn(run, policy(run), cross_entropy)


def sft(run: Run, actor: Actor, loop: str, *, total: int, batch_size: int, before: int | None = None) -> None:
    """A loop of `total` optimizer steps on batches of the run's demonstrations, within another flow.

    Args:
        loop, before: see `Run.steps`.
        batch_size: examples per step, over all ranks.
    """
    examples = run.inputs.demonstrations
    seed = run.config.data.seed
    # whether the warm-up may differ was asked as the run began
    allow = {"warmup", *run.config.trainer.resume_allow}
    called = {"n_rows": ("demonstrations", "warmup"), "batch_size": ("warmup.train_batch_size", "warmup")}
    if total:
        sampler = PromptSampler(len(examples), batch_size, True, seed, allow=allow, called=called)
        run.add(f"{loop}_sampler", sampler)
    for _ in run.steps(loop, total, before=before):
        run.log(loop, update_on(run, actor, cross_entropy, [examples[i] for i in sampler.next()]))

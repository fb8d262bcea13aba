"""Supervised training: cross-entropy on demonstrations."""

from __future__ import annotations

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.data.sampler import PromptSampler
from megarl.phases import Phase
from megarl.roles.actor import Actor
from megarl.trainer.session import Run
from megarl.types import batch_of


def sft(run: Run, actor: Actor, loop: str, *, total: int, batch_size: int, before: int | None = None) -> None:
    """A loop of `total` optimizer steps on batches of the run's demonstrations.

    Args:
        loop, before: see `Run.steps`.
        batch_size: examples per step, over all ranks.
    """
    examples = run.inputs.demonstrations
    seed, allow = run.config.data.seed, run.config.trainer.resume_allow
    if total:
        sampler = run.add(f"{loop}_sampler", PromptSampler(len(examples), batch_size, True, seed, allow=allow))
    for _ in run.steps(loop, total, before=before):
        chosen = [examples[i] for i in sampler.next()]
        batch = batch_of([e.prompt_ids for e in chosen], [e.response_ids for e in chosen], range(len(chosen)))
        (mini_batch,) = run.plan(batch).mini_batches
        with run.phase(Phase.UPDATE):
            run.log(loop, actor.update(batch, mini_batch, cross_entropy))

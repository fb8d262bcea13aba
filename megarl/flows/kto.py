"""Trains with KTO (arXiv 2402.01306) on answers that are said to be desirable or not."""

from __future__ import annotations

import torch

from megarl.algorithms.kto import kto
from megarl.data.example_batch import mismatched
from megarl.flows.learn import learn, policy
from megarl.phases import Phase
from megarl.roles.passes import Passes
from megarl.trainer.build import build_reference
from megarl.trainer.session.run import Run
from megarl.types import Batch


def flow(run: Run) -> None:
    """Train with KTO's loss, whose reference point is the KL to the first policy, estimated on answers to other
    prompts."""
    config, actor = run.config, policy(run)
    reference = run.add("reference", build_reference(config, actor))

    def with_reference(batch: Batch, passes: Passes) -> Batch:
        others = mismatched(batch.everywhere(("tokens", "response_mask")))
        others_plan = actor.plan(others, config.data.train_batch_size)
        others = others.held_by(others_plan.owners)
        with run.phase(Phase.LOG_PROBS):
            logp = actor.log_probs(others, others_plan)
        with run.phase(Phase.REF):
            log_ratios = others.sum_per_sequence(logp - reference.log_probs(others, others_plan))
            ref_logp = reference.log_probs(batch, passes)
        kl = log_ratios.mean().clamp_min(0.0)  # section 4.1: an estimate below 0 is none
        return batch.with_(ref_logp=ref_logp, reference_point=torch.full((len(batch),), float(kl)))

    learn(run, actor, kto(config.algorithm.preference), with_reference)

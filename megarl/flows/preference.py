"""Trains on pairs of answers, one of which is better: DPO, IPO, SimPO, ORPO."""

from __future__ import annotations

from megarl.algorithms.declaration import about_of
from megarl.algorithms.registry import PREFERENCES, build_loss
from megarl.flows.learn import learn, policy
from megarl.phases import Phase
from megarl.roles.passes import Passes
from megarl.trainer.build import build_reference
from megarl.trainer.session.run import Run
from megarl.types import Batch


def flow(run: Run) -> None:
    """Train with the loss that `algorithm.preference.loss_mode` names. Its reference, if it needs one, is the first
    policy."""
    config, preference = run.config, run.config.algorithm.preference
    loss, actor = build_loss(PREFERENCES, preference.loss_mode, preference), policy(run)
    if not about_of(PREFERENCES.load(preference.loss_mode)).needs.reference:
        return learn(run, actor, loss)
    reference = run.add("reference", build_reference(config, actor))

    def with_reference(batch: Batch, passes: Passes) -> Batch:
        with run.phase(Phase.REF):
            return batch.with_(ref_logp=reference.log_probs(batch, passes))

    return learn(run, actor, loss, with_reference)

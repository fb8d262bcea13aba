"""Trains on pairs of answers, one of which is better: DPO, IPO, SimPO, ORPO."""

from __future__ import annotations

from megarl.algorithms.declaration import about_of
from megarl.algorithms.registry import PREFERENCES
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
    factory, actor = PREFERENCES.load(preference.loss_mode), policy(run)
    if not about_of(factory).needs.reference:
        return learn(run, actor, factory(preference))
    reference = run.add("reference", build_reference(config, actor))

    def with_reference(batch: Batch, passes: Passes) -> Batch:
        with run.phase(Phase.REF):
            return batch.with_(ref_logp=reference.log_probs(batch, passes))

    return learn(run, actor, factory(preference), with_reference)

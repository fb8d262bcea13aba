"""Checks whether the engine generates from the model that is trained, by the gap between their log-probabilities."""

from __future__ import annotations

import math

import torch

from megarl.algorithms.over_tokens import total
from megarl.algorithms.rollout_correction import log_ratios
from megarl.config import Config
from megarl.trainer.stopped import RunStopped
from megarl.types import Batch

MAX_LOGP_GAP = {"float32": 0.01, "bfloat16": 0.2}
"""Default of `rollout.max_logp_gap`, nats: the mean over the tokens of |log-probability difference|.

Measured gaps are below 1e-5 in float32 and 0.05 in bfloat16. An engine with other weights is wrong by whole nats.
"""


def check_finite(batch: Batch, config: Config, step: int) -> None:
    """Raise RunStopped, on every rank alike, if the engine gave log-probabilities that are no numbers."""
    assert batch.rollout_logp is not None
    if batch.sum_per_sequence((~batch.rollout_logp.isfinite()).long()).any():
        name = config.actor_rollout_ref.rollout.name
        raise RunStopped(f"step {step}: the {name} engine gave log-probabilities that are not finite")


def check_gap(batch: Batch, config: Config, step: int) -> None:
    """Raise RunStopped, on every rank alike, if the engine cannot have the actor's weights.

    With top_p or top_k the engine's log-probabilities are those of a narrower distribution, so that the gap says
    nothing; and so do tokens that older weights drew.
    """
    rollout = config.actor_rollout_ref.rollout
    where = f"step {step}: the {rollout.name} engine"
    if rollout.top_p < 1 or rollout.top_k > 0:
        return
    gaps = batch.trained(log_ratios(batch)).abs()
    newest = torch.ones_like(gaps) if batch.staleness is None else (batch.trained(batch.staleness) == 0).float()
    compared = float(total(batch, newest))
    if not compared:
        return
    gap = float(total(batch, torch.where(newest > 0, gaps, 0.0))) / compared
    limit = rollout.max_logp_gap or MAX_LOGP_GAP[config.actor_rollout_ref.model.dtype]
    if math.isfinite(gap) and gap > limit:  # log-probabilities of the training layout that are no numbers: the loss
        raise RunStopped(
            f"{where}'s log-probabilities are {gap:.3g} nats from the training layout's on average, more than "
            f"rollout.max_logp_gap = {limit:g}: it does not generate with the actor's weights; set reshard.verify=true "
            f"to find the tensor, try rollout.name=native, or raise the key if the engine rounds more on purpose"
        )

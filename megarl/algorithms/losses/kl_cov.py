"""Penalises the tokens that would lower the entropy most (KL-Cov)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.covariance import covariances, with_selected
from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import log_ratio, policy_output
from megarl.config.policy import ActorConfig
from megarl.types import Batch

KEYS = ("actor.policy_loss.kl_cov_ratio", "actor.policy_loss.ppo_kl_coef")


@about("KL-Cov, arXiv 2505.22617, section 4.2", keys=KEYS, needs=Needs(old_logp=True))
def kl_cov(actor: ActorConfig) -> CovariancePenalty:
    """Compute the unclipped surrogate with a penalty on tokens whose log-probability and advantage go together most."""
    return CovariancePenalty(ratio=actor.policy_loss.kl_cov_ratio, coef=actor.policy_loss.ppo_kl_coef)


@dataclass(frozen=True, kw_only=True)
class CovariancePenalty:
    """Computes -ratio * advantage, and adds coef * |log ratio| for selected tokens (arXiv 2505.22617, section 4.2).

    `old_logp` stands for the current policy in the selection, so that tokens are selected once per mini-batch.

    Attributes:
        ratio: share of the mini-batch's tokens to select, those of the largest covariance, one at least.
        coef: weight of the KL to the policy before the update, estimated as the paper's code does.
    """

    columns: ClassVar = ("old_logp", "advantages", "selected")

    ratio: float
    coef: float

    def prepare(self, batch: Batch, sequences: Sequence[int]) -> Batch:
        """Fill `Batch.selected` with the largest covariances; of equal ones the first."""
        places, of_tokens = covariances(batch, sequences)
        largest = of_tokens.sort(descending=True, stable=True).indices
        return with_selected(batch, places[largest[: max(1, int(self.ratio * len(places)))]])

    def __call__(self, x: LossInput) -> LossOutput:
        log_ratios = log_ratio(x)
        surrogate = -x.columns["advantages"] * log_ratios.exp()
        penalty = self.coef * x.columns["selected"] * log_ratios.abs()
        return policy_output(x, x.weights.dot(surrogate + penalty), log_ratios)

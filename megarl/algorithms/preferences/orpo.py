"""Computes the loss of odds-ratio preference optimization: supervised training with a penalty, no reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.declaration import about, option_keys, with_options
from megarl.algorithms.loss import LossInput, LossOutput, Metric
from megarl.algorithms.pairs import chosen_cross_entropy, log_probs_of_sequences, pair_metrics, pair_weights
from megarl.config.algorithm import PreferenceConfig

NEAR_CERTAIN = -1e-6
"""nats. Odds of a probability nearer to 1 overflow; there they stay as they are, and give no gradient."""


@dataclass(frozen=True, kw_only=True)
class Orpo:
    """Computes cross-entropy(chosen) - beta log sigmoid(log(odds_chosen / odds_rejected)) (arXiv 2403.07691, eq. 6, 7).

    The odds P / (1 - P) are those of an answer's probability per token, P = exp(its mean log-probability) (eq. 1, 4).
    """

    scope: ClassVar[Literal["pair"]] = "pair"

    beta: float

    def __call__(self, x: LossInput) -> LossOutput:
        weights = pair_weights(x, x.sequence_weights())
        mean = log_probs_of_sequences(x, x.output, mean=True)
        chosen, rejected = x.pairs(log_odds(mean))
        supervised = chosen_cross_entropy(x, weights)
        loss = supervised - self.beta * weights.dot(logsigmoid(chosen - rejected))
        metrics = pair_metrics(x, self.beta * mean, weights)
        return LossOutput(loss=loss, metrics={"sft_loss": Metric(value=supervised.detach()), **metrics})


@about("ORPO, arXiv 2403.07691, eq. 6 and 7; beta is its lambda", keys=option_keys("algorithm.preference", Orpo))
def orpo(preference: PreferenceConfig) -> Orpo:
    """Compute the cross-entropy of the chosen answers, plus a logistic loss on the pair's log odds ratio."""
    return with_options(Orpo, preference)


def log_odds(logp: Tensor) -> Tensor:
    """Compute log(P / (1 - P)) from log-probabilities."""
    logp = logp.clamp(max=NEAR_CERTAIN)
    return logp - torch.log(-torch.expm1(logp))

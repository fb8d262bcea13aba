"""Simple preference optimization: no reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.pairs import (
    chosen_cross_entropy,
    log_probs_of_sequences,
    pair_metrics,
    pair_weights,
    preferred,
)
from megarl.config.algorithm import Preference

_KEYS = ("beta", "gamma", "label_smoothing", "sft_coef")


@about(
    "SimPO, arXiv 2405.14734, eq. 6; its margin is beta x gamma here",
    keys=[f"algorithm.preference.{key}" for key in _KEYS],
)
def simpo(preference: Preference) -> Simpo:
    """A logistic loss on the difference of the pair's mean log-probabilities, less a margin."""
    return Simpo(
        beta=preference.beta,
        gamma=preference.gamma,
        label_smoothing=preference.label_smoothing,
        sft_coef=preference.sft_coef,
    )


@dataclass(frozen=True, kw_only=True)
class Simpo:
    """-log sigmoid(beta (l_chosen - l_rejected - gamma)), l = the mean log-probability per token (arXiv 2405.14734,
    eq. 6, whose gamma is beta x gamma).

    Attributes:
        label_smoothing: see `preferred`.
        sft_coef: weight of `chosen_cross_entropy` beside it.
    """

    scope: ClassVar[Literal["pair"]] = "pair"

    beta: float
    gamma: float
    label_smoothing: float = 0.0
    sft_coef: float = 0.0

    def __call__(self, x: LossInput) -> LossOutput:
        weights = pair_weights(x, x.sequence_weights())
        rewards = self.beta * log_probs_of_sequences(x, x.output, mean=True)
        chosen, rejected = x.pairs(rewards)
        loss = weights.dot(preferred(chosen - rejected - self.beta * self.gamma, self.label_smoothing))
        if self.sft_coef:
            loss = loss + self.sft_coef * chosen_cross_entropy(x, weights)
        return LossOutput(loss=loss, metrics=pair_metrics(x, rewards, weights))

"""Computes the loss of simple preference optimization, which has no reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.declaration import about, option_keys, with_options
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.pairs import log_probs_of_sequences, pair_output, pair_weights, preferred
from megarl.config.algorithm import PreferenceConfig


@dataclass(frozen=True, kw_only=True)
class Simpo:
    """Computes -log sigmoid(beta (l_chosen - l_rejected - gamma)), l = the mean log-probability per token
    (arXiv 2405.14734, eq. 6, whose gamma is beta x gamma).

    Attributes:
        label_smoothing: see `preferred`.
        sft_coef: weight of `chosen_cross_entropy` beside this loss.
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
        return pair_output(x, loss, rewards, weights, sft_coef=self.sft_coef)


@about(
    "SimPO, arXiv 2405.14734, eq. 6; its margin is beta x gamma here",
    keys=option_keys("algorithm.preference", Simpo),
)
def simpo(preference: PreferenceConfig) -> Simpo:
    """Compute a logistic loss on the difference of the pair's mean log-probabilities, less a margin."""
    return with_options(Simpo, preference)

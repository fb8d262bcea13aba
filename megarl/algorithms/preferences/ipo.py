"""Computes the loss of identity preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.declaration import Needs, about, option_keys, with_options
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.pairs import log_probs_of_sequences, pair_output, pair_weights
from megarl.config.algorithm import PreferenceConfig


@dataclass(frozen=True, kw_only=True)
class Ipo:
    """Computes (r_chosen - r_rejected - 1 / (2 beta))^2, r = log pi / pi_ref of an answer (arXiv 2310.12036, eq. 17).

    Attributes:
        length_normalization: r is the mean over the answer's tokens, not the sum.
        sft_coef: weight of `chosen_cross_entropy` beside this loss.
    """

    columns: ClassVar = ("ref_logp",)
    scope: ClassVar[Literal["pair"]] = "pair"

    beta: float
    length_normalization: bool = False
    sft_coef: float = 0.0

    def __call__(self, x: LossInput) -> LossOutput:
        weights = pair_weights(x, x.sequence_weights())
        log_ratios = log_probs_of_sequences(x, x.output - x.columns["ref_logp"], mean=self.length_normalization)
        chosen, rejected = x.pairs(log_ratios)
        loss = weights.dot((chosen - rejected - 0.5 / self.beta).square())
        return pair_output(x, loss, self.beta * log_ratios, weights, sft_coef=self.sft_coef)


@about(
    "IPO, arXiv 2310.12036, eq. 17; beta is its tau",
    keys=option_keys("algorithm.preference", Ipo),
    needs=Needs(reference=True),
)
def ipo(preference: PreferenceConfig) -> Ipo:
    """Compute the squared distance of the pair's difference of log-ratios from 1 / (2 beta), where learning ends."""
    return with_options(Ipo, preference)

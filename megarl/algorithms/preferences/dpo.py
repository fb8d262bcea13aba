"""Computes the loss of direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.declaration import Needs, about, option_keys, with_options
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.pairs import log_probs_of_sequences, pair_output, pair_weights, preferred
from megarl.config.algorithm import PreferenceConfig


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """Computes -log sigmoid(beta (r_chosen - r_rejected)), r = log pi / pi_ref of an answer (arXiv 2305.18290, eq. 7).

    Attributes:
        label_smoothing: see `preferred`.
        length_normalization: r is the mean over the answer's tokens, not the sum.
        sft_coef: weight of `chosen_cross_entropy` beside this loss.
    """

    columns: ClassVar = ("ref_logp",)
    scope: ClassVar[Literal["pair"]] = "pair"

    beta: float
    label_smoothing: float = 0.0
    length_normalization: bool = False
    sft_coef: float = 0.0

    def __call__(self, x: LossInput) -> LossOutput:
        weights = pair_weights(x, x.sequence_weights())
        log_ratios = x.output - x.columns["ref_logp"]
        rewards = self.beta * log_probs_of_sequences(x, log_ratios, mean=self.length_normalization)
        chosen, rejected = x.pairs(rewards)
        loss = weights.dot(preferred(chosen - rejected, self.label_smoothing))
        return pair_output(x, loss, rewards, weights, sft_coef=self.sft_coef)


@about(
    "DPO, arXiv 2305.18290, eq. 7; label smoothing: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, eq. 3",
    keys=option_keys("algorithm.preference", Dpo),
    needs=Needs(reference=True),
)
def dpo(preference: PreferenceConfig) -> Dpo:
    """Compute a logistic loss on the difference of the pair's log-ratios to the reference."""
    return with_options(Dpo, preference)

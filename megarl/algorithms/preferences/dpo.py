"""Direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.pairs import (
    chosen_cross_entropy,
    log_probs_of_sequences,
    pair_metrics,
    pair_weights,
    preferred,
)
from megarl.config.algorithm import Preference

_KEYS = ("beta", "label_smoothing", "length_normalization", "sft_coef")


@about(
    "DPO, arXiv 2305.18290, eq. 7; label smoothing: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, eq. 3",
    keys=[f"algorithm.preference.{key}" for key in _KEYS],
    needs=Needs(reference=True),
)
def dpo(preference: Preference) -> Dpo:
    """A logistic loss on the difference of the pair's log-ratios to the reference."""
    return Dpo(
        beta=preference.beta,
        label_smoothing=preference.label_smoothing,
        length_normalization=preference.length_normalization,
        sft_coef=preference.sft_coef,
    )


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """-log sigmoid(beta (r_chosen - r_rejected)), r = log pi / pi_ref of an answer (arXiv 2305.18290, eq. 7).

    Attributes:
        label_smoothing: see `preferred`.
        length_normalization: r is the mean over the answer's tokens, not the sum.
        sft_coef: weight of `chosen_cross_entropy` beside it.
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
        if self.sft_coef:
            loss = loss + self.sft_coef * chosen_cross_entropy(x, weights)
        return LossOutput(loss=loss, metrics=pair_metrics(x, rewards, weights))

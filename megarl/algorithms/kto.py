"""Computes the loss of Kahneman-Tversky optimization, on answers that are desirable or not, without pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.declaration import Needs, about, option_keys, with_options
from megarl.algorithms.loss import LossInput, LossOutput, Metric
from megarl.algorithms.pairs import log_probs_of_sequences
from megarl.config.algorithm import PreferenceConfig


@dataclass(frozen=True, kw_only=True)
class Kto:
    """Computes w (1 - sigmoid(s beta (r - z))), r = log pi / pi_ref of an answer, z the batch's `reference_point`,
    s = 1 for a desirable answer and -1 for another, w the weight of its kind (arXiv 2402.01306, eq. 8).

    The metrics are means over the answers: `reward` beta r, `margin` s beta (r - z), `accuracy` the share on their
    right side of z, and `reference_point`.
    """

    columns: ClassVar = ("ref_logp", "labels", "reference_point")
    scope: ClassVar[Literal["sequence"]] = "sequence"

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, x: LossInput) -> LossOutput:
        weights, labels, z = x.sequence_weights(), x.columns["labels"], x.columns["reference_point"]
        log_ratios = log_probs_of_sequences(x, x.output - x.columns["ref_logp"], mean=False)
        margin = (2.0 * labels - 1.0) * self.beta * (log_ratios - z)
        of_kind = labels * self.desirable_weight + (1.0 - labels) * self.undesirable_weight
        loss = weights.dot(of_kind * (-margin).sigmoid())
        means = {
            "accuracy": (margin > 0).to(weights.dtype),
            "margin": margin,
            "reward": self.beta * log_ratios,
            "reference_point": z,
        }
        return LossOutput(
            loss=loss, metrics={name: Metric(value=weights.dot(mean.detach())) for name, mean in means.items()}
        )


@about(
    "KTO, arXiv 2402.01306, eq. 8",
    keys=option_keys("algorithm.preference", Kto),
    needs=Needs(reference=True),
)
def kto(preference: PreferenceConfig) -> Kto:
    """Compute a sigmoid of how far an answer's log-ratio to the reference is from the mean over mismatched answers."""
    return with_options(Kto, preference)

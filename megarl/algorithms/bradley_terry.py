"""Computes the loss of a reward model on pairs."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.pairs import pair_metrics, pair_weights, preferred


@about("InstructGPT, arXiv 2203.02155, eq. 1; margins: Llama 2, arXiv 2307.09288, eq. 2", keys=["data.margin_key"])
class BradleyTerry:
    """Computes -log sigmoid(score_chosen - score_rejected - margin), the margin being the label of the pair."""

    columns: ClassVar = ("labels",)
    scope: ClassVar[Literal["pair"]] = "pair"

    def __call__(self, x: LossInput) -> LossOutput:
        weights = pair_weights(x, x.weights)
        chosen, rejected = x.pairs(x.output)
        margins, _ = x.pairs(x.columns["labels"])
        loss = weights.dot(preferred(chosen - rejected - margins, 0.0))
        return LossOutput(loss=loss, metrics=pair_metrics(x, x.output, weights))

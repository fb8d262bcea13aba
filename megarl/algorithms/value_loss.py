"""Computes the critic's loss: PPO's clipped squared error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.loss import LossInput, LossOutput, Metric


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Computes 0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2) (arXiv 2005.12729, section 3).

    Attributes:
        cliprange: c, how far a value moves from that before the update; None: any distance.
    """

    columns: ClassVar = ("values", "returns")

    cliprange: float | None = None

    def __call__(self, x: LossInput) -> LossOutput:
        values, old, returns = x.output, x.columns["values"], x.columns["returns"]
        error = (values - returns).square()
        near = values if self.cliprange is None else values.clamp(old - self.cliprange, old + self.cliprange)
        clipped_error = (near - returns).square()
        loss = 0.5 * x.weights.dot(error.maximum(clipped_error))
        return LossOutput(
            loss=loss,
            metrics={
                "vf_loss": Metric(value=loss.detach()),
                "vf_clipfrac": Metric(value=x.weights.dot((clipped_error > error).to(x.weights.dtype))),
                "vpred_mean": Metric(value=x.weights.dot(values.detach())),
            },
        )

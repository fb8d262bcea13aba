"""Computes the loss of supervised training."""

from __future__ import annotations

from megarl.algorithms.loss import LossInput, LossOutput


def cross_entropy(x: LossInput) -> LossOutput:
    """Return minus the log-probability of the tokens."""
    return LossOutput(loss=-x.weights.dot(x.output))

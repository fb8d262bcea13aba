"""Estimates KL(policy || reference) per token from one sampled token, and controls the KL's coefficient."""

from __future__ import annotations

from torch import Tensor

from megarl.config.fields import KlLoss, KlPenalty

MAX_LOG_RATIO = 20.0
"""nats. The exponential of more overflows for a long sequence, and in a gradient 0 x infinity is NaN."""


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: KlPenalty) -> Tensor:
    """Estimate the KL as http://joschu.net/blog/kl-approx.html does, in nats per token, shape of the inputs.

    k1 = log p/q is unbiased with high variance; k2 = (log p/q)^2 / 2 has low variance and a biased value;
    k3 = q/p - 1 - log q/p is unbiased and never negative; abs = |log p/q|.
    """
    log_ratio = logp - ref_logp
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "k2":
        return 0.5 * log_ratio.square()
    inverse = bounded(-log_ratio)
    return inverse.exp() - 1.0 - inverse


def kl_loss(logp: Tensor, ref_logp: Tensor, kind: KlLoss) -> Tensor:
    """Estimate the KL as a loss, differentiable in `logp`.

    On-policy the gradient of k2 is that of the KL, in expectation; that of k1 is 0, and that of k3 biased (Schulman, as
    above; arXiv 2510.01555). `k1+` and `k3+` have the value of k1 and k3, and the gradient of k2.
    """
    if kind == "k1+" or kind == "k3+":
        surrogate = kl_estimate(logp, ref_logp, "k2")
        value = kl_estimate(logp.detach(), ref_logp, "k1" if kind == "k1+" else "k3")
        return value + (surrogate - surrogate.detach())
    return kl_estimate(logp, ref_logp, kind)


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios to +-MAX_LOG_RATIO; beyond, the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


SMALLEST_FACTOR = 0.5
"""Of a step's change of the KL coefficient. Without an end, a batch of more than five horizons would turn it negative,
and the run would be rewarded for leaving the reference."""


class AdaptiveKlController:
    """Steers the coefficient so that the KL per sequence nears a target (Ziegler et al., arXiv 1909.08593, 2.2).

    coefficient *= 1 + clip(KL / target - 1, -0.2, 0.2) x sequences / horizon, a factor of `SMALLEST_FACTOR` at least:
    what a batch of up to 2.5 horizons never goes below.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def state(self) -> float:
        """Return the coefficient."""
        return self.coefficient

    def load_state(self, coefficient: float) -> None:
        """Go on with a saved coefficient."""
        self.coefficient = coefficient

    def update(self, kl_per_sequence: float, sequences: int) -> None:
        """Adjust the coefficient after a step with the given mean KL (nats per sequence) over that many sequences."""
        error = max(-0.2, min(0.2, kl_per_sequence / self.target - 1.0))
        self.coefficient *= max(SMALLEST_FACTOR, 1.0 + error * sequences / self.horizon)

"""Computes terms beside a policy loss: entropy, and the KL to a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.kl import KlLoss, kl_loss
from megarl.algorithms.loss import LossInput, LossOutput, Metric


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """Computes minus the entropy of the next-token distribution, to keep entropy up (arXiv 1602.01783, section 4)."""

    reports: ClassVar = True

    coeff: float

    def __call__(self, x: LossInput) -> LossOutput:
        assert x.entropy is not None
        entropy = x.weights.dot(x.entropy if self.coeff else x.entropy.detach())
        return LossOutput(loss=-self.coeff * entropy, metrics={"entropy": Metric(value=entropy.detach())})


@dataclass(frozen=True, kw_only=True)
class KlToReference:
    """Computes the KL to the reference, estimated at the sampled tokens (GRPO, arXiv 2402.03300, eq. 4).

    Attributes:
        coef: 0 only reports it.
        kind: see `kl_loss`.
    """

    columns: ClassVar = ("ref_logp",)
    reports: ClassVar = True

    coef: float
    kind: KlLoss

    def __call__(self, x: LossInput) -> LossOutput:
        kl = x.weights.dot(kl_loss(x.output if self.coef else x.output.detach(), x.columns["ref_logp"], self.kind))
        return LossOutput(loss=self.coef * kl, metrics={"ref_kl": Metric(value=kl.detach())})

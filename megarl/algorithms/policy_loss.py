"""PPO's policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.kl import KlPenalty, bounded, kl_estimate
from megarl.algorithms.loss import LossInput, LossOutput, Metric
from megarl.config.schema import Actor


def vanilla(actor: Actor) -> PolicyLoss:
    """The loss that the section `actor` asks for."""
    return PolicyLoss(
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        clip_c=actor.clip_ratio_c,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_type=actor.kl_loss_type,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with entropy bonus and KL to a reference.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_c: for negative advantages the loss is capped at -clip_c * advantage (dual clip, arXiv 1912.09729, eq. 5).
        entropy_coeff: weight of the entropy bonus.
        kl_coef, kl_type: weight and estimator of the KL to the reference; 0 leaves it out.
    """

    columns: ClassVar = ("old_logp", "advantages", "ref_logp")

    clip_low: float
    clip_high: float
    clip_c: float | None = None
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_type: KlPenalty = "k3"

    def __call__(self, x: LossInput) -> LossOutput:
        x = x.weighted()
        assert x.entropy is not None
        w, logp, cost = x.weights, x.output, -x.columns["advantages"]
        log_ratio = bounded(logp - x.columns["old_logp"])
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = (cost * ratio).maximum(cost * clipped)
        if self.clip_c is not None:
            capped = surrogate.minimum(cost * self.clip_c)
            surrogate = capped.where(cost > 0, surrogate)
        loss = w.dot(surrogate)
        metrics = {
            "pg_loss": Metric(value=loss.detach()),
            "entropy": Metric(value=w.dot(x.entropy.detach())),
            "clipfrac": Metric(value=w.dot((clipped != ratio).to(w.dtype))),
            "ppo_kl": Metric(value=-w.dot(log_ratio.detach())),
        }
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * w.dot(x.entropy)
        if "ref_logp" in x.columns:
            kl = w.dot(kl_estimate(logp, x.columns["ref_logp"], self.kl_type))
            loss = loss + self.kl_coef * kl
            metrics["ref_kl"] = Metric(value=kl.detach())
        if len(ratio):
            furthest = (ratio.detach() - 1).abs().max()
            metrics["ratio_max_deviation"] = Metric(value=furthest, reduce="max")
            metrics["first_ratio_max_deviation"] = Metric(value=furthest, reduce="first")
        return LossOutput(loss=loss, metrics=metrics)

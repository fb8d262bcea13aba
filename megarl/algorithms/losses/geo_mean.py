"""Computes Geometric-Mean Policy Optimization: a response's ratio is the geometric mean of its tokens' clipped ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import CLIP_KEYS, log_ratio, policy_output
from megarl.config.policy import ActorConfig


@about("GMPO, arXiv 2507.20673", keys=CLIP_KEYS)
def geo_mean(actor: ActorConfig) -> GeometricMean:
    """Compute advantage times the geometric mean of the tokens' clipped ratios; the clip range is in nats."""
    return GeometricMean(clip_low=actor.clip_low, clip_high=actor.clip_high)


@dataclass(frozen=True, kw_only=True)
class GeometricMean:
    """Computes -advantage * product of clipped token ratios ** (1 / tokens) (arXiv 2507.20673).

    `seq-mean-token-mean` weighs sequences as the paper does. Weight and advantage of a sequence come from its tokens:
    their weights' sum, and their advantages' weighted mean.

    Attributes:
        clip_low, clip_high: nats; log-ratios are at most clip_high where the advantage is above 0, and at least
            -clip_low elsewhere.
    """

    columns: ClassVar = ("old_logp", "advantages")
    scope: ClassVar = "sequence"

    clip_low: float
    clip_high: float

    def __call__(self, x: LossInput) -> LossOutput:
        advantages, log_ratios = x.columns["advantages"], log_ratio(x)
        above, below = log_ratios.clamp_max(self.clip_high), log_ratios.clamp_min(-self.clip_low)
        clipped = above.where(advantages > 0, below)
        cost, ratio = -x.per_sequence(x.weights * advantages), x.mean_per_sequence(clipped).exp()
        return policy_output(x, cost.dot(ratio), log_ratios, x.weights.dot((clipped != log_ratios).to(cost.dtype)))

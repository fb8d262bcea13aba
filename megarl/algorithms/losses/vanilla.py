"""PPO's clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput, Metric
from megarl.algorithms.ratio import log_ratio, ratio_metrics
from megarl.config.schema import Actor

KEYS = ("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high")


@about(
    "PPO, arXiv 1707.06347, eq. 7; dual clip: 1912.09729, eq. 5; clip-higher: 2503.14476, eq. 10",
    keys=(*KEYS, "actor.clip_ratio_c"),
)
def vanilla(actor: Actor) -> PolicyClip:
    """The surrogate of probability ratio and advantage, clipped on both sides, each with its own range."""
    return PolicyClip(clip_low=actor.clip_low, clip_high=actor.clip_high, clip_c=actor.clip_ratio_c)


@dataclass(frozen=True, kw_only=True)
class PolicyClip:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7).

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (arXiv 2503.14476, eq. 10).
        clip_c: for negative advantages the loss is capped at -clip_c * advantage (dual clip, arXiv 1912.09729, eq. 5).
    """

    columns: ClassVar = ("old_logp", "advantages")

    clip_low: float
    clip_high: float
    clip_c: float | None = None

    def __call__(self, x: LossInput) -> LossOutput:
        cost, log_ratios = -x.columns["advantages"], log_ratio(x)
        ratio = log_ratios.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = (cost * ratio).maximum(cost * clipped)
        if self.clip_c is not None:
            capped = surrogate.minimum(cost * self.clip_c)
            surrogate = capped.where(cost > 0, surrogate)
        loss = x.weights.dot(surrogate)
        return LossOutput(
            loss=loss,
            metrics={"pg_loss": Metric(value=loss.detach()), **ratio_metrics(x, log_ratios, clipped != ratio)},
        )

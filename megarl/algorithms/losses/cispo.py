"""Computes clipped importance-sampling policy optimization: the weight is clipped, every token keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import CLIP_KEYS, log_ratio, policy_output
from megarl.config.policy import ActorConfig


@about("CISPO, arXiv 2506.13585, eq. 4 and 5", keys=CLIP_KEYS)
def cispo(actor: ActorConfig) -> ClippedWeight:
    """Compute REINFORCE with each token's probability ratio as a weight, which is clipped and has no gradient."""
    return ClippedWeight(clip_low=actor.clip_low, clip_high=actor.clip_high)


@dataclass(frozen=True, kw_only=True)
class ClippedWeight:
    """Computes -sg(clipped ratio) * advantage * log p (arXiv 2506.13585, eq. 4 and 5).

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """

    columns: ClassVar = ("old_logp", "advantages")

    clip_low: float
    clip_high: float

    def __call__(self, x: LossInput) -> LossOutput:
        log_ratios = log_ratio(x).detach()
        ratio = log_ratios.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = x.weights.dot(-x.columns["advantages"] * clipped * x.output)
        return policy_output(x, loss, log_ratios, x.weights.dot((clipped != ratio).to(ratio.dtype)))

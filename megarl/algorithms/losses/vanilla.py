"""Computes PPO's clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import CLIP_KEYS, clipped_surrogate, log_ratio, policy_output
from megarl.config.policy import ActorConfig


@about(
    "PPO, arXiv 1707.06347, eq. 7; dual clip: 1912.09729, eq. 5; clip-higher: 2503.14476, eq. 10",
    keys=(*CLIP_KEYS, "actor.clip_ratio_c"),
)
def vanilla(actor: ActorConfig) -> PolicyClip:
    """Compute the surrogate of probability ratio and advantage, clipped on both sides, each with its own range."""
    return PolicyClip(clip_low=actor.clip_low, clip_high=actor.clip_high, clip_c=actor.clip_ratio_c)


@dataclass(frozen=True, kw_only=True)
class PolicyClip:
    """Computes PPO's clipped surrogate (arXiv 1707.06347, eq. 7).

    With importance weights of the tokens it is decoupled PPO (arXiv 2110.00641; 2505.24298, eq. 5): the policy
    before the update is the proximal one, the engine's the behaviour policy.

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
        surrogate, clipped = clipped_surrogate(cost, log_ratios.exp(), self.clip_low, self.clip_high)
        if self.clip_c is not None:
            capped = surrogate.minimum(cost * self.clip_c)
            surrogate = capped.where(cost > 0, surrogate)
        return policy_output(x, x.weights.dot(surrogate), log_ratios, x.weights.dot(clipped.to(cost.dtype)))

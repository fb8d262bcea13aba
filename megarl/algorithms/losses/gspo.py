"""Computes Group Sequence Policy Optimization: ratio and clip are those of whole responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import CLIP_KEYS, clipped_surrogate, log_ratio, policy_output
from megarl.config.policy import ActorConfig


@about("GSPO, arXiv 2507.18071, eq. 5 and 7", keys=CLIP_KEYS)
def gspo(actor: ActorConfig) -> SequenceClip:
    """Compute PPO's clipped surrogate of a response's ratio, the geometric mean of its tokens' ratios."""
    return SequenceClip(clip_low=actor.clip_low, clip_high=actor.clip_high)


@dataclass(frozen=True, kw_only=True)
class SequenceClip:
    """Computes the clipped surrogate of sequences (arXiv 2507.18071, eq. 5).

    `seq-mean-token-mean` weighs sequences as the paper does. Weight and advantage of a sequence come from its tokens:
    their weights' sum, and their advantages' weighted mean.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """

    columns: ClassVar = ("old_logp", "advantages")
    scope: ClassVar = "sequence"

    clip_low: float
    clip_high: float

    def __call__(self, x: LossInput) -> LossOutput:
        cost, log_ratios = -x.per_sequence(x.weights * x.columns["advantages"]), log_ratio(x)
        ratio = x.mean_per_sequence(log_ratios).exp()
        surrogate, clipped = clipped_surrogate(cost, ratio, self.clip_low, self.clip_high)
        return policy_output(x, surrogate.sum(), log_ratios, x.sequence_weights().dot(clipped.to(ratio.dtype)))

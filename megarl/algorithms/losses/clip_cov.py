"""Takes the gradient from some of the tokens that would lower the entropy most (Clip-Cov)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import torch

from megarl.algorithms.covariance import covariances, with_selected
from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import CLIP_KEYS, clipped_surrogate, log_ratio, policy_output
from megarl.config.policy import ActorConfig
from megarl.types import Batch

KEYS = ("actor.policy_loss.clip_cov_ratio", "actor.policy_loss.clip_cov_lb", "actor.policy_loss.clip_cov_ub")


@about("Clip-Cov, arXiv 2505.22617, section 4.2", keys=(*CLIP_KEYS, *KEYS), needs=Needs(old_logp=True))
def clip_cov(actor: ActorConfig) -> CovarianceClip:
    """Compute PPO's clipped surrogate without a few tokens whose log-probability and advantage go together."""
    options = actor.policy_loss
    return CovarianceClip(
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        ratio=options.clip_cov_ratio,
        lowest=options.clip_cov_lb,
        highest=options.clip_cov_ub,
    )


@dataclass(frozen=True, kw_only=True)
class CovarianceClip:
    """Computes the clipped surrogate, 0 for selected tokens (arXiv 2505.22617, section 4.2).

    `old_logp` stands for the current policy in the selection, so that tokens are selected once per mini-batch.

    Attributes:
        clip_low, clip_high: the probability ratio is clipped to [1 - clip_low, 1 + clip_high].
        ratio: share of the mini-batch's tokens to select, one at least.
        lowest, highest: tokens are drawn among those whose covariance is between these.
    """

    columns: ClassVar = ("old_logp", "advantages", "selected")

    clip_low: float
    clip_high: float
    ratio: float
    lowest: float
    highest: float

    def prepare(self, batch: Batch, sequences: Sequence[int]) -> Batch:
        """Fill `Batch.selected`, drawn with a seed from the token ids, which are the same in every layout."""
        places, of_tokens = covariances(batch, sequences)
        tokens = batch.trained(batch.tokens)[places].numpy().tobytes()
        seed = int.from_bytes(blake2b(tokens, digest_size=7).digest(), "big")
        drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        drawn = drawn[((of_tokens > self.lowest) & (of_tokens < self.highest))[drawn]]
        return with_selected(batch, places[drawn[: max(1, int(self.ratio * len(places)))]])

    def __call__(self, x: LossInput) -> LossOutput:
        log_ratios, selected = log_ratio(x), x.columns["selected"] != 0
        cost = -x.columns["advantages"]
        surrogate, clipped = clipped_surrogate(cost, log_ratios.exp(), self.clip_low, self.clip_high)
        loss = x.weights.dot(surrogate.masked_fill(selected, 0.0))
        return policy_output(x, loss, log_ratios, x.weights.dot((clipped | selected).to(cost.dtype)))

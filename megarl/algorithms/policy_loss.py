"""The losses of a policy update. Token weights carry the global denominator; there are no collectives here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megarl.algorithms.kl import KlPenalty, bounded, kl_estimate


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The trained tokens of one micro-batch; every tensor is float32 [tokens].

    Attributes:
        logp, entropy: by the current policy, differentiable; nats.
        weights: the tokens' shares of the mini-batch loss (`aggregation.token_weights`).
        old_logp, advantages, ref_logp: as in `Batch`.
    """

    logp: Tensor
    entropy: Tensor
    weights: Tensor
    old_logp: Tensor | None = None
    advantages: Tensor | None = None
    ref_logp: Tensor | None = None

    def weighted(self) -> TokenBatch:
        """The same with 0 in place of every value of a token of weight 0.

        A token is rejected because its values are extreme, and 0 x infinity is NaN, in the loss as in its gradient.
        """
        kept = self.weights != 0
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        return replace(self, **{name: torch.where(kept, x, 0.0) for name, x in values.items() if x is not None})


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A micro-batch's share of the loss and of the metrics.

    Attributes:
        loss: scalar to differentiate.
        sums: metrics that add up over micro-batches and ranks.
        maxima: metrics of which the largest counts.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with entropy bonus and KL to a reference.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_c: for negative advantages the loss is capped at -clip_c * advantage (dual clip, arXiv 1912.09729, eq. 5).
        entropy_coeff: weight of the entropy bonus.
        kl_coef, kl_type: weight and estimator of the KL to the reference; 0 leaves it out.
    """

    clip_low: float
    clip_high: float
    clip_c: float | None = None
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_type: KlPenalty = "k3"

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        tokens = tokens.weighted()
        assert tokens.old_logp is not None and tokens.advantages is not None
        w, cost = tokens.weights, -tokens.advantages
        log_ratio = bounded(tokens.logp - tokens.old_logp)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = (cost * ratio).maximum(cost * clipped)
        if self.clip_c is not None:
            capped = surrogate.minimum(cost * self.clip_c)
            surrogate = capped.where(cost > 0, surrogate)
        loss = w.dot(surrogate)
        sums = {
            "actor/pg_loss": loss.detach(),
            "actor/entropy": w.dot(tokens.entropy.detach()),
            "actor/clipfrac": w.dot((clipped != ratio).to(w.dtype)),
            "actor/ppo_kl": -w.dot(log_ratio.detach()),
        }
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * w.dot(tokens.entropy)
        if tokens.ref_logp is not None:
            kl = w.dot(kl_estimate(tokens.logp, tokens.ref_logp, self.kl_type))
            loss = loss + self.kl_coef * kl
            sums["actor/ref_kl"] = kl.detach()
        maxima = {"actor/ratio_max_deviation": (ratio.detach() - 1).abs().max()} if len(ratio) else {}
        return LossOutput(loss=loss, sums={"actor/loss": loss.detach(), **sums}, maxima=maxima)


def supervised_loss(tokens: TokenBatch) -> LossOutput:
    """Cross-entropy of the tokens."""
    tokens = tokens.weighted()
    loss = -tokens.weights.dot(tokens.logp)
    return LossOutput(loss=loss, sums={"actor/loss": loss.detach()}, maxima={})

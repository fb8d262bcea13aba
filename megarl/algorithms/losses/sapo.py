"""Computes Soft Adaptive Policy Optimization: a smooth gate takes the place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import log_ratio, policy_output
from megarl.config.policy import ActorConfig


@about("SAPO, arXiv 2511.20347, eq. 5 and 6", keys=("actor.policy_loss.tau_pos", "actor.policy_loss.tau_neg"))
def sapo(actor: ActorConfig) -> SoftGate:
    """Compute advantage times a sigmoid of the probability ratio, steeper for negative advantages."""
    return SoftGate(tau_pos=actor.policy_loss.tau_pos, tau_neg=actor.policy_loss.tau_neg)


@dataclass(frozen=True, kw_only=True)
class SoftGate:
    """Computes -4 / tau * sigmoid(tau (ratio - 1)) * advantage (arXiv 2511.20347, eq. 5 and 6).

    At ratio 1 the gradient is PPO's; to both sides of that ratio it dies down.

    Attributes:
        tau_pos, tau_neg: tau where the advantage is above 0, and elsewhere; a larger one dies down sooner.
    """

    columns: ClassVar = ("old_logp", "advantages")

    tau_pos: float
    tau_neg: float

    def __call__(self, x: LossInput) -> LossOutput:
        advantages, log_ratios = x.columns["advantages"], log_ratio(x)
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = 4.0 / tau * torch.sigmoid(tau * (log_ratios.exp() - 1.0))
        return policy_output(x, x.weights.dot(-advantages * gate), log_ratios)

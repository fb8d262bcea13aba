"""Computes the policy gradient as it is, without a ratio."""

from __future__ import annotations

from megarl.algorithms.declaration import about
from megarl.algorithms.loss import LossInput, LossOutput
from megarl.algorithms.ratio import log_ratio, policy_output
from megarl.config.policy import ActorConfig


@about("REINFORCE, Williams 1992; the loss of RAFT, arXiv 2304.06767, and, with its advantages, of GPG, 2504.02546")
def reinforce(actor: ActorConfig) -> PolicyGradient:
    """Compute minus advantage times log-probability."""
    del actor
    return PolicyGradient()


class PolicyGradient:
    """Computes -advantage * log p (Williams 1992, "Simple Statistical Gradient-Following Algorithms").

    The metrics alone read `old_logp`.
    """

    columns = ("old_logp", "advantages")

    def __call__(self, x: LossInput) -> LossOutput:
        return policy_output(x, x.weights.dot(-x.columns["advantages"] * x.output), log_ratio(x))

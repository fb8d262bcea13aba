"""Computes advantages per token from rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.changed_batch import changed_by, checked_batch
from megarl.algorithms.declaration import about_of
from megarl.algorithms.group_scores import over_parts
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.registry import ESTIMATORS
from megarl.config.algorithm import AlgorithmConfig
from megarl.own_code import OwnCodeError, form_of, torch_as_before
from megarl.types import Batch


def compute_advantages(batch: Batch, config: AlgorithmConfig, kl_coef: float, compare: bool = False) -> Batch:
    """Add `advantages` to a batch: those of the scores, less the KL to the reference if the reward has it.

    A sequence without trained tokens (its response was not scored) has advantage 0. The batch gets `token_rewards` too.

    Args:
        kl_coef: weight of the KL to the reference, which the batch gets as `kl_in_reward`.
        compare: whether the ranks compare what a user's estimator has returned.
    """
    assert batch.rewards is not None
    scores, batch = batch.rewards, with_token_rewards(batch)
    if config.use_kl_in_reward:
        assert batch.old_logp is not None and batch.ref_logp is not None and batch.token_rewards is not None
        per_token = torch.where(
            batch.response_mask, kl_estimate(batch.old_logp, batch.ref_logp, config.kl_penalty), 0.0
        )
        kl = batch.sum_per_sequence(per_token)
        batch = batch.with_(kl_in_reward=kl, token_rewards=batch.token_rewards - kl_coef * per_token)
        scores = scores - kl_coef * over_parts(batch, kl)
    estimator, scored = ESTIMATORS.load(config.adv_estimator), batch.with_(rewards=scores)

    def estimate(scored: Batch) -> Batch:
        given: Any = estimator(scored, config)
        changed, advantages = (given, given.advantages) if isinstance(given, Batch) else (scored, given)
        return changed.with_(advantages=_checked(advantages, scored, config.adv_estimator))

    name = f"algorithm.adv_estimator = {config.adv_estimator}"
    if about_of(estimator).sharded:
        with torch_as_before():
            result = checked_batch(estimate(scored), scored, name)
            if compare and not ESTIMATORS.is_ours(config.adv_estimator):
                _check_sharded(estimate, scored, result, name)
    else:
        result = changed_by(estimate, scored, name, compare=compare)
    assert result.advantages is not None
    advantages = torch.where(batch.response_mask, result.advantages, 0.0)
    return result.with_(rewards=batch.rewards, advantages=advantages)


_COMPARED_TOKENS = 1 << 22
"""Tokens, of all sequences, that a rank can hold beside its own without noticing: some 150 MB."""


def _check_sharded(estimate: Callable[[Batch], Batch], batch: Batch, result: Batch, name: str) -> None:
    """Raise OwnCodeError on every rank if an estimator gives other advantages for a share of the tokens than for all
    of them, as one does that is declared with sharded=True and takes the mean over its own; every rank calls this."""
    owners = batch.owners
    if owners is None or int(batch.cu_seqlens[-1]) > _COMPARED_TOKENS:
        return
    of_all = estimate(batch.everywhere()).held_by(owners).advantages
    assert of_all is not None and result.advantages is not None
    differ = ~torch.isclose(of_all, result.advantages, rtol=1e-3, atol=1e-4, equal_nan=True) & batch.response_mask
    if int(owners.sum_(differ.sum(), "advantages of shares and of all tokens")):
        raise OwnCodeError(
            f"{name} is declared with sharded=True and gives other advantages for a share of the tokens than for all: "
            f"compute over all of them with batch.sum_per_sequence and megarl.algorithms.over_tokens, or leave sharded "
            f"out",
            everywhere=True,
        )


def _checked(advantages: Any, batch: Batch, name: str) -> Tensor:
    """Return advantages as float32 [T]; raises OwnCodeError, naming the estimator, where they are none."""
    if isinstance(advantages, Tensor) and advantages.shape == batch.tokens.shape:
        return advantages.detach().to("cpu", torch.float32)
    raise OwnCodeError(
        f"algorithm.adv_estimator = {name} must return a tensor [{len(batch.tokens)}], an advantage for each token of "
        f"the batch it is given, or that batch with such advantages; it returned {form_of(advantages)}"
    )


def with_token_rewards(batch: Batch) -> Batch:
    """Add `token_rewards` to a batch: each score at its sequence's last trained token, 0 elsewhere."""
    assert batch.rewards is not None
    lengths = batch.own_response_lengths
    rewards = torch.zeros(int(lengths.sum()))
    rewards[lengths[lengths > 0].cumsum(0) - 1] = batch.rewards[batch.own][lengths > 0]
    return batch.with_(token_rewards=batch.at_trained(rewards))

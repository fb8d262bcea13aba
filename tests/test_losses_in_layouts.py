"""Every policy loss trains alike in every layout, and the gradient of a loss does not depend on its scope."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from ranks import Ranks
from selection import quick
from training_cases import ARCH, Case, actor_in, fixed_batch, mini_batch_of, update

from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.loss import LossInput, LossOutput, Scope, Sum
from megarl.algorithms.losses.vanilla import PolicyClip
from megarl.algorithms.registry import LOSSES
from megarl.algorithms.regularizers import Entropy
from megarl.models.architecture import Architecture
from megarl.types import Batch

NAMES = LOSSES.names()
LR, EPS = 3e-3, 1e-3  # an epsilon as large as gradients: Adam would else make a step of the rounding of those near 0
SETTINGS = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "kl_cov_ratio": 0.2}

History = dict[tuple[str, int], list[tuple[float, float]]]
"""(loss, sequences per micro-batch) -> loss and gradient norm of three updates."""


def _batch(actor: Any) -> Batch:
    """Off-policy, with importance weights and rejected tokens, and advantages that do not add up to 0."""
    batch, generator = fixed_batch(), torch.Generator().manual_seed(8)
    tokens, mask = len(batch.tokens), batch.response_mask
    old = actor.log_probs(batch, mini_batch_of(actor)) + 0.3 * torch.randn(tokens, generator=generator)
    advantages = 0.5 + torch.randn(len(batch), generator=generator)[batch.sequence_of_token]
    importance = torch.rand(tokens, generator=generator) + 0.5
    importance *= torch.rand(tokens, generator=generator) > 0.2
    return batch.with_(old_logp=old * mask, advantages=advantages * mask, importance=importance * mask)


def _train(case: Case, sizes: tuple[int, ...]) -> History:
    from megarl.config.policy import ActorConfig, OptimConfig
    from megarl.models.fill import random_source

    config = ActorConfig.model_validate({"policy_loss": SETTINGS})
    out: History = {}
    with actor_in(case, lr=LR, adam_eps=EPS) as actor:
        batch = _batch(actor)
        for name in NAMES:
            loss = LOSSES.load(name)(config)
            for size in sizes:
                actor.load(random_source(actor.arch, 1))
                actor.restart_optimizer(OptimConfig(lr=LR, adam_eps=EPS), 4)
                updates = [update(actor, batch, loss, size) for _ in range(3)]
                out[name, size] = [(metrics["loss"], metrics["grad_norm"]) for metrics in updates]
    return out


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> History:
    """One rank, no parallelism."""
    return ranks.run(1, _train, Case(), (2, 4, 16))[0]


@pytest.mark.slow
def test_the_size_of_micro_batches_changes_nothing(plain: History) -> None:
    for name in NAMES:
        losses, norms = zip(*plain[name, 2], strict=True)
        assert losses[2] < losses[0] and min(norms) > 0.01
        for size in (4, 16):
            for got, want in zip(plain[name, size], plain[name, 2], strict=True):
                assert got == pytest.approx(want, rel=1e-6), (name, size)


@pytest.mark.parametrize(
    "case",
    quick(
        [
            Case(dp=2),
            Case(packed=False),
            Case(tp=2, pp=2, sequence_parallel=True),
            Case(pp=2, dp=2, chunks=2),
            Case(cp=2),
            Case(cp=2, gathers=True),
            Case(tp=2, cp=2, packed=False),
        ],
    ),
    ids=lambda case: case.name,
)
def test_the_layout_changes_nothing(ranks: Ranks, plain: History, case: Case) -> None:
    for history in ranks.run(case.world, _train, case, (2,)):
        for name in NAMES:
            for got, want in zip(history[name, 2], plain[name, 2], strict=True):
                assert got == pytest.approx(want, rel=1e-6), name


# -------------------------------------------------------------------- the same loss with another scope declared


@dataclass(frozen=True)
class Scoped:
    """PPO's loss with an entropy bonus, as one that must see so much at once."""

    scope: Scope
    columns: ClassVar = ("old_logp", "advantages")

    def __call__(self, x: LossInput) -> LossOutput:
        return Sum(PolicyClip(clip_low=0.2, clip_high=0.28), Entropy(coeff=0.05))(x)


Updates = list[tuple[float, float]]


def _both_scopes(case: Case, arch: Architecture) -> tuple[dict[str, float], list[Updates]]:
    """How far two scopes' gradients are apart, of each parameter as a share of their norm; three updates of each."""
    from megarl.config.policy import OptimConfig
    from megarl.models.fill import random_source

    gradients, histories = [], []
    with actor_in(case, arch) as actor:
        batch, mini_batch = _batch(actor), mini_batch_of(actor)
        weights = token_weights(batch, range(len(batch)))
        for loss in (Scoped("token"), Scoped("sequence")):
            actor.load(random_source(actor.arch, 1))
            actor.restart_optimizer(OptimConfig(lr=LR, adam_eps=EPS), 4)
            actor.accumulate_gradients(batch, mini_batch, weights, loss)
            gradients.append({name: p.main_grad.clone() for name, p in actor.parameters().items()})
            updates = [actor.update(batch, mini_batch, loss, weights) for _ in range(3)]
            histories.append([(float(m["loss"].value), float(m["grad_norm"].value)) for m in updates])
    token, sequence = gradients
    return {name: float((sequence[name] - x).norm() / x.norm()) for name, x in token.items()}, histories


WITHOUT_DISTRIBUTED_OPTIMIZER = {"actor": {"megatron": {"use_distributed_optimizer": False}}}
OVERLAP = {"actor": {"megatron": {"overlap_grad_reduce": True}}}


@pytest.mark.parametrize("output", quick(["tied", "lm"], 0))
@pytest.mark.parametrize(
    "case",
    quick(
        [
            Case(pp=2, config=OVERLAP),
            Case(tp=2, config=WITHOUT_DISTRIBUTED_OPTIMIZER),
            Case(dp=2, config=OVERLAP),
            Case(tp=2, pp=2, sequence_parallel=True),
        ],
        0,
    ),
    ids=lambda case: case.name,
)
def test_the_scope_of_a_loss_changes_no_gradient(ranks: Ranks, case: Case, output: Any) -> None:
    for apart, (token, sequence) in ranks.run(case.world, _both_scopes, case, replace(ARCH, output=output)):
        assert apart and max(apart.values()) < 1e-6, apart
        for got, want in zip(sequence, token, strict=True):
            assert got == pytest.approx(want, rel=1e-6)

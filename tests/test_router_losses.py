"""The routers' losses and counts: against the formula, in every layout, and what a run reports of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from selection import quick
from training_cases import SOME_WITH_EXPERTS, WITH_EXPERTS, Case, actor_in, fixed_batch, mini_batch_of, update

from megarl.algorithms.loss import LossInput, LossOutput
from megarl.models.architecture import Architecture

AUX, Z = 0.7, 0.05


def _weighted(case: Case, **more: float) -> Case:
    megatron = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z, "sequence_parallel": case.sequence_parallel, **more}
    actor = {**case.config.get("actor", {}), "megatron": megatron}
    return replace(case, config={**case.config, "actor": actor})


def _nothing(x: LossInput) -> LossOutput:
    return LossOutput(loss=0.0 * x.output.sum())


def _against_the_formula(arch: Architecture, packed: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of the last layer's router, and those of the formula for the states and choices that it had."""
    from megatron.core.transformer.moe.router import TopKRouter

    with actor_in(_weighted(Case(packed=packed)), arch) as actor:
        batch = fixed_batch()
        *_, router = (module for module in actor.chunks[0].modules() if isinstance(module, TopKRouter))
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        router.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].detach(), output[1])))
        mini_batch = mini_batch_of(actor, 4)
        actor.router_losses.begin(len(batch.tokens))
        actor.accumulate_gradients(batch, mini_batch, torch.ones(len(batch.tokens)), _nothing)
        weight, total = router.weight.detach().clone().requires_grad_(), torch.zeros(())
        moe = arch.moe
        assert moe is not None
        for (x, chosen), sequences in zip(seen, mini_batch.micro_batches, strict=True):
            longest = max(int(batch.lengths[i]) for i in sequences)
            for_each = [(torch.arange(longest) < batch.lengths[i]) for i in sequences]
            real = torch.ones(len(chosen), dtype=torch.bool) if packed else torch.stack(for_each, dim=1).flatten()
            logits = x.flatten(0, -2)[real] @ weight.T
            scores = logits.softmax(-1)
            if moe.score_function == "sigmoid":
                scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            fraction = chosen[real].float().mean(0) / moe.experts_per_token
            balance = moe.num_experts * (fraction * scores.mean(0)).sum()
            total = total + AUX * balance * int(real.sum()) / len(batch.tokens)
            total = total + Z * torch.logsumexp(logits, -1).square().sum() / len(batch.tokens)
        (want,) = torch.autograd.grad(total, weight)
        return [(router.weight.main_grad.clone(), want)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("arch", [WITH_EXPERTS, SOME_WITH_EXPERTS], ids=["softmax", "sigmoid"])
def test_the_gradient_is_the_formulas(ranks: Ranks, arch: Architecture, packed: bool) -> None:
    ((got, want),) = ranks.run(1, _against_the_formula, arch, packed)[0]
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def _train(case: Case, arch: Architecture) -> list[dict[str, float]]:
    """Three updates, a sequence to a micro-batch: then every layout has the same micro-batches."""
    with actor_in(case, arch, lr=3e-3) as actor:
        return [update(actor, fixed_batch(), size=1) for _ in range(3)]


NAMES = ("loss", "grad_norm", "router_aux_loss", "router_z_loss", "expert_load_max", "expert_load_min")
CASES = [
    Case(dp=2, ep=2),
    Case(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True),
    Case(pp=2, dp=2, chunks=2),
    Case(cp=2, dp=2, ep=2),
    Case(tp=2, packed=False, sequence_parallel=True),
    Case(pp=2, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
    Case(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True),
    Case(cp=2, ep=2, packed=False),
]


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> list[dict[str, float]]:
    return ranks.run(1, _train, _weighted(Case()), WITH_EXPERTS)[0]


@pytest.mark.parametrize("case", quick(CASES), ids=lambda case: case.name + "-".join(map(str, case.config)))
def test_losses_are_those_of_one_rank(ranks: Ranks, plain: list[dict[str, float]], case: Case) -> None:
    for history in ranks.run(case.world, _train, _weighted(case), WITH_EXPERTS):
        for got, want in zip(history, plain, strict=True):
            assert {name: got[name] for name in NAMES} == pytest.approx({name: want[name] for name in NAMES}, rel=1e-5)


def _spread(aux: float) -> tuple[float, float]:
    """The largest load of an expert before and after some updates."""
    case = _weighted(Case(), moe_aux_loss_coeff=aux, moe_z_loss_coeff=0.0)
    with actor_in(case, WITH_EXPERTS, lr=1e-2) as actor:
        loads = [update(actor, fixed_batch(), size=4)["expert_load_max"] for _ in range(12)]
        return loads[0], loads[-1]


def test_tokens_are_spread_over_the_experts(ranks: Ranks) -> None:
    ((before, after),), ((same, without),) = (ranks.run(1, _spread, aux) for aux in (3.0, 0.0))
    assert before == same > 1.2
    assert after - 1 < 0.6 * (before - 1) and after < without


def _metrics_without(case: Case) -> set[str]:
    with actor_in(case, WITH_EXPERTS) as actor:
        return set(update(actor, fixed_batch()))


def test_loads_are_reported_without_losses(ranks: Ranks) -> None:
    names: Any = ranks.run(1, _metrics_without, Case())[0]
    assert {"expert_load_max", "expert_load_min"} <= names and "router_aux_loss" not in names

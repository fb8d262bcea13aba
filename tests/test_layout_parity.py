"""The same numbers in every layout: real Megatron-Core ranks over gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import changed
from ranks import Ranks
from selection import quick
from training_cases import (
    ARCH,
    LATENT,
    LINEAR,
    NORMS_AND_EXPERTS,
    NORMS_BEHIND,
    SINKS,
    SOME_WITH_EXPERTS,
    WIDE,
    WIDE_WITH_EXPERTS,
    WINDOWS,
    WITH_EXPERTS,
    Case,
    actor_in,
    fixed_batch,
    same_again,
    train,
    update,
)

from megarl.models.architecture import Architecture

GOLDEN = Path(__file__).parent / "golden" / "policy_20_steps.json"

OVERLAP = {"actor": {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}}

CASES = [
    Case(tp=2),
    Case(pp=2),
    Case(tp=2, pp=2),
    Case(dp=2),
    Case(tp=2, sequence_parallel=True),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(tp=4, sequence_parallel=True),
    Case(pp=4),
    Case(pp=2, chunks=2),
    Case(pp=2, dp=2, chunks=2),
    Case(packed=False),
    Case(tp=2, pp=2, packed=False, sequence_parallel=True),
    Case(tp=2, dp=2, config={"actor": {"megatron": {"use_distributed_optimizer": False}}}),
    Case(dp=2, pp=2, config={"actor": {"megatron": {"overlap_grad_reduce": True}}}),
    Case(dp=2, pp=2, config=OVERLAP),
    Case(dp=2, pp=2, chunks=2, config=OVERLAP),
    Case(tp=2, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
]


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, list[tuple[float, float]]]:
    """One rank, no parallelism."""
    return {loss: ranks.run(1, train, Case(), 3, loss)[0] for loss in ("supervised", "policy")}


@pytest.mark.parametrize("case", quick(CASES, 5, 9, 14), ids=lambda case: case.name + "-".join(map(str, case.config)))
@pytest.mark.parametrize("loss", [pytest.param("supervised", marks=pytest.mark.slow), "policy"])
def test_loss_and_gradient_norm_agree(
    ranks: Ranks, plain: dict[str, list[tuple[float, float]]], case: Case, loss: str
) -> None:
    for history in ranks.run(case.world, train, case, 3, loss):
        for got, want in zip(history, plain[loss], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


CONTEXT_CASES = [
    Case(cp=2),
    Case(cp=2, packed=False),
    Case(cp=4),
    Case(tp=2, cp=2, sequence_parallel=True),
    Case(pp=2, cp=2, chunks=2),
    Case(cp=2, dp=2, config={"actor": {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}}),
    Case(cp=2, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
    Case(tp=2, cp=2, sequence_parallel=True, packed=False),
    Case(cp=4, gathers=True),
    Case(tp=2, cp=2, gathers=True, sequence_parallel=True),
    Case(pp=2, cp=2, gathers=True, chunks=2),
    Case(tp=2, cp=3, gathers=True),
    Case(cp=4, packed=False),
    Case(cp=4, dp=2),
    Case(tp=2, cp=2),
    Case(pp=2, cp=2),
    Case(pp=2, cp=2, packed=False),
    Case(tp=2, pp=2, cp=2, sequence_parallel=True),
    Case(cp=2, dp=2, gathers=True),
]


@pytest.mark.parametrize("case", quick(CONTEXT_CASES, 2), ids=lambda case: case.name + "-".join(map(str, case.config)))
@pytest.mark.parametrize("loss", [pytest.param("supervised", marks=pytest.mark.slow), "policy"])
def test_loss_and_gradient_norm_agree_with_context_parallelism(
    ranks: Ranks, plain: dict[str, list[tuple[float, float]]], case: Case, loss: str
) -> None:
    """Of four ranks two have the same KV head; three of two heads could not have equally many."""
    for history in ranks.run(case.world, train, case, 3, loss):
        for got, want in zip(history, plain[loss], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


RECOMPUTED = {"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}
SEVEN = changed(ARCH, num_layers=7)
UNEVEN_CASES = [
    Case(pp=2),
    Case(pp=4),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(pp=2, dp=2, chunks=2, config=OVERLAP),
]


@pytest.fixture(scope="module")
def plain_of_seven(ranks: Ranks) -> list[tuple[float, float]]:
    return ranks.run(1, train, Case(), 3, "policy", SEVEN)[0]


@pytest.mark.parametrize("case", quick(UNEVEN_CASES, 1), ids=lambda case: case.name)
def test_stages_may_differ_by_a_layer(ranks: Ranks, plain_of_seven: list[tuple[float, float]], case: Case) -> None:
    for history in ranks.run(case.world, train, case, 3, "policy", SEVEN):
        for got, want in zip(history, plain_of_seven, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


SPLIT_CASES = [
    Case(pp=2, split="Et|t*6L"),
    Case(pp=3, split="E|t*7|L"),
    Case(pp=2, chunks=2, split="E|ttt|t|tttL"),
    Case(tp=2, pp=2, sequence_parallel=True, split="Ett|t*5L", config=RECOMPUTED),
    Case(pp=2, dp=2, chunks=2, split="Ettt|t|ttt|L", config=OVERLAP),
]


@pytest.mark.parametrize("case", quick(SPLIT_CASES, 1, 2), ids=lambda case: case.name)
def test_stages_may_have_any_layers(ranks: Ranks, plain_of_seven: list[tuple[float, float]], case: Case) -> None:
    """Stages of the embedding alone and of the loss alone among them."""
    for history in ranks.run(case.world, train, case, 3, "policy", SEVEN):
        for got, want in zip(history, plain_of_seven, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_80_layers_on_6_stages(ranks: Ranks) -> None:
    """Of Llama-3-70B's number; 12 with the embedding, 12 with the loss, and 14 on each stage between."""
    deep = changed(ARCH, num_layers=80, output="lm")
    (plain,) = ranks.run(1, train, Case(), 2, "policy", deep)
    for history in ranks.run(6, train, Case(pp=6, split="Et*12|(t*14|)*4t*12L"), 2, "policy", deep):
        for got, want in zip(history, plain, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


EXPERT_CASES = [
    Case(tp=2, sequence_parallel=True),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(tp=2, dp=2, sequence_parallel=True),
    Case(dp=2, pp=2, chunks=2),
    Case(tp=2, sequence_parallel=True, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
    Case(dp=2, ep=2),
    Case(tp=2, ep=2, etp=1, sequence_parallel=True),
    Case(tp=2, dp=2, ep=2, sequence_parallel=True),
    Case(dp=4, ep=2, etp=2),
    Case(dp=2, pp=2, ep=2, chunks=2),
    Case(dp=3, ep=3),
    Case(tp=2, etp=1, sequence_parallel=True),
    Case(cp=2, ep=2),
    Case(pp=2, cp=2, ep=2),
    Case(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True),
    Case(tp=2, cp=2, gathers=True, ep=2, etp=1, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def plain_with_experts(ranks: Ranks) -> list[tuple[float, float]]:
    return ranks.run(1, train, Case(), 3, "policy", WITH_EXPERTS)[0]


@pytest.mark.parametrize("case", quick(EXPERT_CASES, 3), ids=lambda case: case.name + "-".join(map(str, case.config)))
def test_loss_and_gradient_norm_agree_with_experts(
    ranks: Ranks, plain_with_experts: list[tuple[float, float]], case: Case
) -> None:
    for history in ranks.run(case.world, train, case, 3, "policy", WITH_EXPERTS):
        for got, want in zip(history, plain_with_experts, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


MIXED_CASES = [
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(dp=2, pp=2, ep=2, chunks=2),
    Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
    Case(dp=2, ep=2),
    Case(tp=2, sequence_parallel=True, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
    Case(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True),
    Case(cp=2, ep=2, packed=False),
    Case(dp=4, ep=4),
    Case(dp=2, ep=2, packed=False),
]


def _train_with_biases(case: Case, arch: Architecture) -> tuple[list[tuple[float, float]], bool]:
    """Losses and gradient norms, and whether the routers' biases stayed as they were."""
    with actor_in(case, arch, lr=3e-3) as actor:
        biases = {name: p for name, p in actor.parameters().items() if name.endswith("expert_bias")}
        before = {name: p.clone() for name, p in biases.items()}
        updates = [update(actor, fixed_batch(), size=2) for _ in range(3)]
        kept = all(torch.equal(p, before[name]) and p.any() for name, p in biases.items())
        return [(metrics["loss"], metrics["grad_norm"]) for metrics in updates], kept


@pytest.fixture(scope="module", params=[SOME_WITH_EXPERTS, LATENT], ids=lambda arch: arch.family)
def plain_mixed(ranks: Ranks, request: pytest.FixtureRequest) -> tuple[Architecture, list[tuple[float, float]]]:
    return request.param, ranks.run(1, _train_with_biases, Case(), request.param)[0][0]


@pytest.mark.parametrize("case", quick(MIXED_CASES, 1), ids=lambda case: case.name + "-".join(map(str, case.config)))
def test_loss_and_gradient_norm_agree_with_layers_of_two_kinds(
    ranks: Ranks, plain_mixed: tuple[Architecture, list[tuple[float, float]]], case: Case
) -> None:
    arch, wanted = plain_mixed
    for history, kept in ranks.run(case.world, _train_with_biases, case, arch):
        assert kept
        for got, want in zip(history, wanted, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "case",
    [Case(tp=2, dp=2, pp=2, ep=2, etp=2, sequence_parallel=True), Case(dp=8, ep=4, etp=2)],
    ids=lambda case: case.name,
)
@pytest.mark.slow
def test_loss_and_gradient_norm_agree_with_experts_over_8_ranks(ranks: Ranks, case: Case) -> None:
    _agree(ranks, case, SOME_WITH_EXPERTS)


DENSE_LATENT = replace(LATENT, layers=((LATENT.layer(0), 3),))
LATENT_CASES = [
    Case(tp=2, packed=False),
    Case(tp=2, dp=2, sequence_parallel=True, packed=False),
    Case(tp=4),
    Case(cp=4),
    Case(tp=2, cp=2, packed=False),
    Case(cp=2, gathers=True),
]


@pytest.fixture(scope="module")
def plain_latent(ranks: Ranks) -> list[tuple[float, float]]:
    return ranks.run(1, train, Case(), 3, "policy", DENSE_LATENT)[0]


@pytest.mark.parametrize("case", quick(LATENT_CASES, 0), ids=lambda case: case.name)
def test_loss_and_gradient_norm_agree_with_latent_attention(
    ranks: Ranks, plain_latent: list[tuple[float, float]], case: Case
) -> None:
    """Without sequence parallelism, which experts over ranks need, and in padded rows."""
    for history in ranks.run(case.world, train, case, 3, "policy", DENSE_LATENT):
        for got, want in zip(history, plain_latent, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


WINDOW_CASES = [
    Case(cp=2),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(dp=2, pp=2, chunks=2),
    Case(tp=2, packed=False),
    Case(tp=4, sequence_parallel=True),
    Case(tp=2, sequence_parallel=True, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
    Case(cp=2, gathers=True),
]


@pytest.fixture(scope="module")
def plain_windows(ranks: Ranks) -> list[tuple[float, float]]:
    return ranks.run(1, train, Case(), 3, "policy", WINDOWS)[0]


@pytest.mark.parametrize("case", quick(WINDOW_CASES, 0), ids=lambda case: case.name + "-".join(map(str, case.config)))
def test_loss_and_gradient_norm_agree_with_windows(
    ranks: Ranks, plain_windows: list[tuple[float, float]], case: Case
) -> None:
    for history in ranks.run(case.world, train, case, 3, "policy", WINDOWS):
        for got, want in zip(history, plain_windows, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "case",
    quick(
        [
            Case(tp=2, pp=2, sequence_parallel=True),
            Case(tp=4),
            Case(tp=4, sequence_parallel=True, packed=False),
            Case(tp=2, cp=2),
        ],
        1,
    ),
    ids=lambda case: case.name,
)
def test_loss_and_gradient_norm_agree_with_norms_over_all_heads(ranks: Ranks, case: Case) -> None:
    """With four ranks, two have the same KV head."""
    _agree(ranks, case, NORMS_BEHIND)


@pytest.mark.parametrize(
    "case",
    [Case(tp=2, ep=2, etp=1, sequence_parallel=True), Case(tp=2, dp=2, ep=2, sequence_parallel=True)],
    ids=lambda case: case.name,
)
@pytest.mark.slow
def test_loss_and_gradient_norm_agree_with_such_norms_and_experts(ranks: Ranks, case: Case) -> None:
    _agree(ranks, case, NORMS_AND_EXPERTS)


def _agree(ranks: Ranks, case: Case, arch: Architecture) -> None:
    plain = ranks.run(1, train, Case(), 3, "policy", arch)[0]
    for history in ranks.run(case.world, train, case, 3, "policy", arch):
        for got, want in zip(history, plain, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("arch", [WIDE, WIDE_WITH_EXPERTS], ids=["dense", "experts"])
def test_a_pass_with_gradients_has_the_bits_of_one_without(ranks: Ranks, arch: Architecture) -> None:
    """The first ratio is exactly 1. A later Megatron-Core orders a token's experts with gradients alone."""
    assert ranks.run(1, same_again, arch, "float32")[0] == (True, 0.0)


SINK_CASES = [
    Case(cp=2),
    Case(tp=2, cp=2, etp=1, sequence_parallel=True, packed=False),
    Case(tp=2, pp=2, etp=1, sequence_parallel=True),
    Case(dp=2, pp=2, ep=2, chunks=2),
    Case(tp=2, ep=2, etp=1, sequence_parallel=True),
    Case(tp=2, dp=2, etp=1, sequence_parallel=True, packed=False),
    Case(dp=2, config={"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}),
    Case(cp=2, gathers=True),
]


@pytest.fixture(scope="module")
def plain_sinks(ranks: Ranks) -> list[tuple[float, float]]:
    return ranks.run(1, train, Case(), 3, "policy", SINKS)[0]


@pytest.mark.parametrize("case", quick(SINK_CASES, 0), ids=lambda case: case.name + "-".join(map(str, case.config)))
def test_loss_and_gradient_norm_agree_with_sinks(
    ranks: Ranks, plain_sinks: list[tuple[float, float]], case: Case
) -> None:
    for history in ranks.run(case.world, train, case, 3, "policy", SINKS):
        for got, want in zip(history, plain_sinks, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


DENSE_LINEAR = replace(
    LINEAR, layers=tuple((replace(layer, mlp=ARCH.layer(0).mlp), count) for layer, count in LINEAR.layers)
)
LINEAR_CASES = [
    (LINEAR, Case(tp=2, pp=2, sequence_parallel=True)),
    (LINEAR, Case(dp=2, pp=2, ep=2, chunks=2)),
    (DENSE_LINEAR, Case(tp=2, dp=2, packed=False)),
    (LINEAR, Case(tp=4, sequence_parallel=True)),
    (LINEAR, Case(tp=2, sequence_parallel=True, config=RECOMPUTED)),
    (DENSE_LINEAR, Case(tp=4)),
]


@pytest.fixture(scope="module")
def plain_linear(ranks: Ranks) -> dict[Architecture, list[tuple[float, float]]]:
    return {arch: ranks.run(1, train, Case(), 3, "policy", arch)[0] for arch in (LINEAR, DENSE_LINEAR)}


@pytest.mark.parametrize(
    ("arch", "case"), quick(LINEAR_CASES, 2), ids=[f"{case.name}-{i}" for i, (_, case) in enumerate(LINEAR_CASES)]
)
def test_loss_and_gradient_norm_agree_with_linear_attention(
    ranks: Ranks, plain_linear: dict[Architecture, list[tuple[float, float]]], arch: Architecture, case: Case
) -> None:
    for history in ranks.run(case.world, train, case, 3, "policy", arch):
        for got, want in zip(history, plain_linear[arch], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_golden_curve(ranks: Ranks) -> None:
    """20 policy updates give the recorded losses and gradient norms. Rewrite: python tests/test_layout_parity.py."""
    golden = json.loads(GOLDEN.read_text())
    history = ranks.run(1, train, Case(), 20, "policy")[0]
    assert [loss for loss, _ in history] == pytest.approx(golden["loss"], rel=1e-4, abs=1e-6)
    assert [norm for _, norm in history] == pytest.approx(golden["grad_norm"], rel=1e-3)


if __name__ == "__main__":
    pool = Ranks()
    curve = pool.run(1, train, Case(), 20, "policy")[0]
    pool.close()
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps({"loss": [a for a, _ in curve], "grad_norm": [b for _, b in curve]}, indent=1) + "\n")

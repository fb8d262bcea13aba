"""On-policy identities, and the generation layout's log-probabilities against the training layout's."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from architectures import changed
from ranks import Ranks
from selection import quick
from training_cases import (
    ARCH,
    LATENT,
    LINEAR,
    LINEAR_APART,
    NORMS_AND_EXPERTS,
    NORMS_BEHIND,
    SINKS,
    SOME_WITH_EXPERTS,
    WINDOWS,
    WITH_EXPERTS,
    Case,
    actor_in,
    fixed_batch,
    hybrid_of,
    mini_batch_of,
    policy_loss,
    reference_of,
    update,
)

from megarl.models.architecture import Architecture
from megarl.models.parts.experts import MixtureOfExperts
from megarl.types import Prompt, SamplingParams

OVERLAP = {"actor": {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}}
OFFLOAD = {"actor": {"megatron": {"param_offload": True, "optimizer_offload": True}}}


def _first_update(case: Case) -> tuple[dict[str, float], float]:
    """Metrics of the first mini-batch with a reference, and the largest |log p - log p_ref| before it."""
    from megarl.algorithms.advantages import compute_advantages
    from megarl.config.algorithm import AlgorithmConfig

    with actor_in(case, lr=1e-2) as actor:
        reference = reference_of(actor)
        batch, mini_batch = fixed_batch().with_(temperature=0.8), mini_batch_of(actor, 3)
        batch = batch.with_(
            old_logp=actor.log_probs(batch, mini_batch), ref_logp=reference.log_probs(batch, mini_batch)
        )
        assert batch.old_logp is not None and batch.ref_logp is not None
        gap = float((batch.old_logp - batch.ref_logp).abs().max())
        batch = compute_advantages(batch, AlgorithmConfig(use_kl_in_reward=True), 0.5)
        loss = policy_loss(kl_coef=0.1)
        first, second = (update(actor, batch, loss, size=3) for _ in range(2))
        assert second["ratio_max_deviation"] > 1e-3  # the policy has moved
        return first, gap


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        pytest.param(Case(tp=2, pp=2, sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(Case(pp=2, dp=2), marks=pytest.mark.slow),
        pytest.param(Case(tp=2, packed=False), marks=pytest.mark.slow),
        pytest.param(Case(cp=2, dp=2), marks=pytest.mark.slow),
    ],
    ids=lambda case: case.name,
)
def test_first_ratio_is_exactly_one(ranks: Ranks, case: Case) -> None:
    for metrics, gap in ranks.run(case.world, _first_update, case):
        assert gap == 0.0
        assert metrics["ratio_max_deviation"] == 0.0
        assert metrics["ppo_kl"] == 0.0
        assert metrics["ref_kl"] == 0.0
        assert metrics["clipfrac"] == 0.0


def _generate_and_compare(
    case: Case, temperature: float, arch: Architecture = ARCH, dtype: str = "float32"
) -> tuple[list[tuple[int, ...]], float]:
    """Responses by the hybrid engine after an update, and how far its log-probs are from the training layout's."""
    with actor_in(case, arch, dtype, lr=1e-2) as actor:
        hybrid = hybrid_of(actor, max_model_len=32)
        prompts = [Prompt(index=i, token_ids=(3 + i, 5, 7), row={}) for i in range(5)]
        params = SamplingParams(temperature=temperature, max_tokens=9, stop_token_ids=(1,))
        for _ in range(2):  # the second time with other weights, after the engine gave its memory back
            update(actor, fixed_batch(), size=8)
            with hybrid.phase():
                rollouts = hybrid.rollouts(prompts, 3, params, seed=1, round_=4)
        made = rollouts.to_batch()
        logp = actor.log_probs(made, actor.plan(made))
        assert made.rollout_logp is not None
        gap = float((logp - made.rollout_logp).abs().max())
        return [tuple(rollout.response.ids) for rollout in rollouts], gap


def _engine_config(gen_tp: int, *, whole_experts: bool = False) -> dict[str, Any]:
    experts = {"enable_expert_parallel": whole_experts}
    return {
        "rollout": {"tensor_model_parallel_size": gen_tp, "max_num_seqs": 4, **experts},
        "reshard": {"verify": True, "bucket_bytes": 4096},
    }


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_engine_log_probs_equal_the_training_layouts(ranks: Ranks, temperature: float) -> None:
    """And the same seed gives the same rollouts on any layout."""
    cases = [
        Case(config=_engine_config(1)),
        Case(tp=2, pp=2, gen_tp=2, sequence_parallel=True, config=_engine_config(2)),
        Case(pp=2, dp=2, gen_tp=4, config=_engine_config(4)),
        Case(tp=2, dp=2, gen_tp=1, config={**_engine_config(1), **OVERLAP}),
        Case(tp=4, gen_tp=2, config=_engine_config(2)),
        Case(tp=2, cp=2, gen_tp=4, sequence_parallel=True, config=_engine_config(4)),
    ]
    wanted = None
    for case in cases:
        for tokens, gap in ranks.run(case.world, _generate_and_compare, case, temperature):
            assert gap < 1e-5
            wanted = wanted or tokens
            assert tokens == wanted
    assert (
        wanted is not None
        and len(set(wanted)) >= (4 if temperature == 0 else 12)
        and ARCH.vocab_size > max(map(max, wanted))
    )


@pytest.mark.slow
def test_engine_log_probs_equal_the_training_layouts_with_experts(ranks: Ranks) -> None:
    cases = [
        Case(tp=2, pp=2, gen_tp=2, sequence_parallel=True, config=_engine_config(2)),
        Case(pp=2, dp=2, gen_tp=4, config=_engine_config(4)),
        Case(dp=4, ep=2, gen_tp=2, config=_engine_config(2)),
        Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, gen_tp=4, config=_engine_config(4)),
        Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, gen_tp=2, config=_engine_config(2, whole_experts=True)),
        Case(pp=2, dp=2, ep=2, gen_tp=2, config=_engine_config(2, whole_experts=True)),
    ]
    responses = set()
    for case in cases:
        for tokens, gap in ranks.run(case.world, _generate_and_compare, case, 0.7, WITH_EXPERTS):
            assert gap < 1e-5
            responses.add(tuple(tokens))
    assert len(responses) == 1


@pytest.mark.slow
def test_an_expert_that_is_whole_in_both_layouts_is_shared(ranks: Ranks) -> None:
    """Rank 0 has the first of two experts in training and in generation: the engine reads training's memory."""
    arch = changed(ARCH, moe=MixtureOfExperts(num_experts=2, experts_per_token=1, norm_topk_prob=False))
    cases = [Case(), Case(dp=2, ep=2, gen_tp=2, config=_engine_config(2, whole_experts=True))]
    responses = set()
    for case in cases:
        for tokens, gap in ranks.run(case.world, _generate_and_compare, case, 0.7, arch):
            assert gap < 1e-5
            responses.add(tuple(tokens))
    assert len(responses) == 1


MIXED = [
    Case(tp=2, pp=2, gen_tp=2, sequence_parallel=True, config=_engine_config(2)),
    Case(pp=2, dp=2, gen_tp=1, config=_engine_config(1) | OFFLOAD),
    Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, gen_tp=4, config=_engine_config(4, whole_experts=True)),
]


@pytest.mark.parametrize(
    "arch",
    quick([SOME_WITH_EXPERTS, LATENT, LINEAR, LINEAR_APART, NORMS_AND_EXPERTS]),
    ids=lambda arch: arch.family,
)
@pytest.mark.parametrize("dtype", quick(["float32", "bfloat16"], 0))
def test_engine_log_probs_with_layers_of_two_kinds(
    ranks: Ranks, dtype: Literal["float32", "bfloat16"], arch: Architecture
) -> None:
    """The routers' biases are float32 in both; the reshard compares bits. Rounding may choose other experts."""
    responses = set()
    for case in MIXED:
        for tokens, gap in ranks.run(case.world, _generate_and_compare, case, 0.7, arch, dtype):
            assert gap < (1e-5 if dtype == "float32" else 1.0)
            responses.add(tuple(tokens))
    assert len(responses) == 1 or dtype == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "arch"), quick([("float32", WINDOWS), ("float32", NORMS_BEHIND), ("bfloat16", WINDOWS)])
)
def test_engine_log_probs_of_other_dense_layers(
    ranks: Ranks, dtype: Literal["float32", "bfloat16"], arch: Architecture
) -> None:
    """Responses are longer than the windows, and the reshard shares, moves and rounds nothing."""
    cases = [
        Case(tp=2, pp=2, gen_tp=2, sequence_parallel=True, config=_engine_config(2)),
        Case(pp=2, dp=2, gen_tp=4, config=_engine_config(4) | OFFLOAD),
        Case(tp=4, gen_tp=1, config=_engine_config(1)),
    ]
    responses = set()
    for case in cases:
        for tokens, gap in ranks.run(case.world, _generate_and_compare, case, 0.7, arch, dtype):
            assert gap < (1e-5 if dtype == "float32" else 1.0)
            responses.add(tuple(tokens))
    assert len(responses) == 1 or dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick(["float32", "bfloat16"], 0))
def test_engine_log_probs_with_sinks(ranks: Ranks, dtype: Literal["float32", "bfloat16"]) -> None:
    """The engine has the experts of a layer in one tensor, and training each in its own."""
    cases = [
        Case(tp=2, pp=2, etp=1, gen_tp=2, sequence_parallel=True, config=_engine_config(2, whole_experts=True)),
        Case(pp=2, dp=2, ep=2, gen_tp=4, config=_engine_config(4) | OFFLOAD),
        Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, gen_tp=1, config=_engine_config(1)),
    ]
    responses = set()
    for case in cases:
        for tokens, gap in ranks.run(case.world, _generate_and_compare, case, 0.7, SINKS, dtype):
            assert gap < (1e-5 if dtype == "float32" else 1.0)
            responses.add(tuple(tokens))
    assert len(responses) == 1 or dtype == "bfloat16"

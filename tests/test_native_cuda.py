"""The native engine on GPUs: kernels and CUDA graphs against plain torch, and against memory that moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_weights import fill_engine, random_weights
from ranks import Ranks
from tiny_engines import GREEDY, GROUPS, MIXED, SAMPLED, assert_same, engine_of
from tiny_families import ARCHITECTURES

from megarl.rollout.native import kernels
from megarl.rollout.native.engine import NativeEngine
from megarl.types import Completion, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SEEDS = range(len(GROUPS))
FILTERED = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, max_tokens=14)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        "gemma3_text",
        "gpt_oss",
        "deepseek_v3",
        "qwen3_next",
        "qwen3_5_moe_text",
    ],
)
def test_cuda_equals_cpu(family: str, enforce_eager: bool, params: SamplingParams) -> None:
    arch = ARCHITECTURES[family]
    want = engine_of(arch).generate(GROUPS, params, seeds=SEEDS)
    engine = engine_of(arch, device="cuda", max_num_seqs=7, enforce_eager=enforce_eager)
    assert_same(engine.generate(GROUPS, params, seeds=SEEDS), want, tolerance=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_yarn", "qwen3_moe", "gemma3_text", "deepseek_v3_yarn"])
def test_prompts_in_parts_equal_whole_ones_on_the_cpu(family: str) -> None:
    arch, seeds = ARCHITECTURES[family], range(len(MIXED))
    want = engine_of(arch).generate(MIXED, SAMPLED, seeds=seeds)
    engine = engine_of(arch, device="cuda", max_num_seqs=4, max_num_batched_tokens=7)
    assert_same(engine.generate(MIXED, SAMPLED, seeds=seeds), want, tolerance=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_equal_eager(dtype: torch.dtype, family: str) -> None:
    """Bit for bit with the same rows in each batch; the last batches are filled up, so their products may round."""
    arch, settings = ARCHITECTURES[family], {"device": "cuda", "dtype": dtype, "max_num_seqs": 8}
    params = SamplingParams(max_tokens=30)
    want = engine_of(arch, enforce_eager=True, **settings).generate(GROUPS[:8], params, seeds=range(8))
    assert engine_of(arch, **settings).generate(GROUPS[:8], params, seeds=range(8)) == want


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe_groups", "deepseek_v3", "qwen3_next"])
def test_mixtures_decode_in_graphs(family: str) -> None:
    """A captured graph would fail if the step read anything back."""
    engine = engine_of(ARCHITECTURES[family], device="cuda", max_num_seqs=8)
    engine.generate(GROUPS, SAMPLED, seeds=SEEDS)
    assert engine._graphs is not None and engine._graphs._graphs


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_kernels_equal_torch(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    arch, settings = ARCHITECTURES[family], {"device": "cuda", "enforce_eager": True}
    got = engine_of(arch, **settings).generate(GROUPS, SAMPLED, seeds=SEEDS)
    monkeypatch.setattr(kernels, "on", lambda device: False)
    assert_same(got, engine_of(arch, **settings).generate(GROUPS, SAMPLED, seeds=SEEDS), tolerance=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_bfloat16_is_finite_and_close(family: str) -> None:
    arch = ARCHITECTURES[family]
    exact = engine_of(arch).generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    rounded = engine_of(arch, device="cuda", dtype=torch.bfloat16).generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    for a, b in zip(exact, rounded, strict=True):
        assert torch.tensor(b.response.logp).isfinite().all()
        assert b.response.logp[0] == pytest.approx(a.response.logp[0], abs=0.1)


@pytest.mark.parametrize("release_weights", [False, True])
def test_graphs_survive_memory_that_moves(release_weights: bool) -> None:
    arch = ARCHITECTURES["qwen3"]
    engine = engine_of(arch, device="cuda", max_num_seqs=7)
    want = engine.generate(GROUPS, SAMPLED, seeds=SEEDS)
    taken = []
    for _ in range(2):
        engine.sleep(release_weights=release_weights)
        # what was given back is used, so that the engine's memory comes back somewhere else
        taken.append([torch.full((n,), torch.nan, device="cuda") for n in (10, 1_000, 20_000, 300_000, 2_000_000)])
        engine.wake(weights_only=True)
        if release_weights:
            fill_engine(engine.parameters(), arch, random_weights(arch, seed=1), 1, 0)
        engine.wake()
        assert engine.generate(GROUPS, SAMPLED, seeds=SEEDS) == want


def test_weights_written_in_place_are_what_graphs_read() -> None:
    arch = ARCHITECTURES["qwen2"]
    engine = engine_of(arch, device="cuda")
    engine.generate(GROUPS, SAMPLED, seeds=SEEDS)
    fill_engine(engine.parameters(), arch, random_weights(arch, seed=2), 1, 0)
    other = engine_of(arch)
    fill_engine(other.parameters(), arch, random_weights(arch, seed=2), 1, 0)
    want = other.generate(GROUPS, SAMPLED, seeds=SEEDS)
    assert_same(engine.generate(GROUPS, SAMPLED, seeds=SEEDS), want, tolerance=1e-4)


def _generate_on_rank(settings: dict[str, Any], family: str = "qwen3") -> list[Completion]:
    assert dist.group.WORLD is not None
    engine: NativeEngine = engine_of(ARCHITECTURES[family], dist.group.WORLD, device="cuda", **settings)
    completions = engine.generate(GROUPS, SAMPLED, seeds=SEEDS)
    engine.close()  # graphs that hold collectives must go before the group
    return completions


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tensor_parallel_equals_one_rank(ranks: Ranks, enforce_eager: bool) -> None:
    want = engine_of(ARCHITECTURES["qwen3"]).generate(GROUPS, SAMPLED, seeds=SEEDS)
    got = ranks.run(2, _generate_on_rank, {"max_num_seqs": 7, "enforce_eager": enforce_eager})
    assert got[0] == got[1]
    assert_same(got[0], want, tolerance=1e-4)


@pytest.mark.parametrize("enable_expert_parallel", [False, True])
def test_experts_over_ranks_equal_one_rank(ranks: Ranks, enable_expert_parallel: bool) -> None:
    want = engine_of(ARCHITECTURES["glm4_moe"]).generate(GROUPS, SAMPLED, seeds=SEEDS)
    settings = {"max_num_seqs": 7, "enable_expert_parallel": enable_expert_parallel}
    got = ranks.run(2, _generate_on_rank, settings, "glm4_moe")
    assert got[0] == got[1]
    assert_same(got[0], want, tolerance=1e-4)

"""The vLLM engine on GPUs: what its parameters hold after a reshard, for every family, and what it generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from full_weights import random_weights, source_of
from ranks import Ranks
from tiny_families import CONFIGS
from training_cases import Case, actor_in, hybrid_of
from vllm_layout import wanted_by_vllm

from megarl.models.families import read_architecture
from megarl.models.tensors import volume
from megarl.models.weights import logical_tensors
from megarl.types import Prompt, SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("vllm") is None, reason="needs GPUs and vLLM"
)

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen3_moe_plain"]


@pytest.fixture
def vllm_ranks() -> Iterator[Ranks]:
    """Ranks of their own for every test: an engine that follows one which slept dies."""
    pool = Ranks()
    yield pool
    pool.close()


def _folder(name: str, folder: Path) -> str:
    """The family's tiny config with heads and experts of a size that vLLM has kernels for."""
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 128, "vocab_size": 150}
    if "num_experts" in CONFIGS[name]:
        sizes["moe_intermediate_size"] = 128
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | sizes))
    return str(folder)


def _reshard_and_generate(case: Case, folder: str, sleeps: bool, whole_experts: bool = False) -> tuple[int, float]:
    """With two sets of weights: elements compared bit for bit each time, and the largest mean gap of the log-probs."""
    arch = read_architecture(folder)
    rollout = {"name": "vllm", "tensor_model_parallel_size": case.gen_tp, "max_num_seqs": 16, "enforce_eager": True}
    config = {
        "model": {"path": folder, "dtype": "bfloat16"},
        "actor": {"megatron": {"sequence_parallel": case.sequence_parallel}},
        "rollout": rollout
        | {
            "gpu_memory_utilization": 0.03,
            "free_cache_engine": sleeps,
            "enable_expert_parallel": whole_experts,
        },
    }
    case = Case(**{**vars(case), "config": config})
    prompts = [Prompt(index=i, token_ids=(3 + i, 5, 7), row={}) for i in range(8)]
    gap = 0.0
    with actor_in(case, arch, "bfloat16") as actor:
        hybrid = hybrid_of(actor, max_model_len=64)
        at = hybrid.groups
        for seed in (1, 2):
            full = {name: 0.3 * weight for name, weight in random_weights(arch, seed).items()}
            actor.load(source_of(full))
            with hybrid.phase():
                compared = 0
                for name, p in hybrid.engine.parameters().items():
                    wanted = wanted_by_vllm(
                        name, p, full, case.gen_tp, at.tp_rank, arch.moe, whole_experts=whole_experts
                    )
                    assert torch.equal(p, wanted.to(p.device, p.dtype)), name
                    compared += p.numel()
                rollouts = hybrid.rollouts(prompts, 2, SamplingParams(max_tokens=12), seed=1, round_=seed)
            made = rollouts.to_batch()
            logp = actor.log_probs(made, actor.plan(made))
            assert made.rollout_logp is not None
            gap = max(gap, float((logp - made.rollout_logp)[made.response_mask].abs().mean()))
        hybrid.close()
    return compared, gap


def _check(ranks: Ranks, case: Case, family: str, tmp_path: Path, *, sleeps: bool, whole_experts: bool = False) -> None:
    folder = _folder(family, tmp_path / family)
    whole = sum(volume(tensor.box) for tensor in logical_tensors(read_architecture(folder)).values())
    for compared, gap in ranks.run(case.world, _reshard_and_generate, case, folder, sleeps, whole_experts):
        assert compared * case.gen_tp >= whole
        assert gap < 0.05, family  # bf16 has 8 bits, and an expert changes where two are equally probable


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, gen_tp=2),
        Case(pp=2, gen_tp=1),
        Case(tp=2, sequence_parallel=True, gen_tp=2),
        Case(tp=2, sequence_parallel=True, gen_tp=1),
        Case(gen_tp=1),
    ],
    ids=lambda case: f"{case.name}-to-tp{case.gen_tp}",
)
def test_parameters_of_every_family_are_bit_equal_after_a_reshard(
    vllm_ranks: Ranks, case: Case, tmp_path: Path
) -> None:
    """One engine after the other in the same processes."""
    for family in FAMILIES:
        _check(vllm_ranks, case, family, tmp_path, sleeps=False)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_parameters_are_bit_equal_after_sleep_and_wake(vllm_ranks: Ranks, family: str, tmp_path: Path) -> None:
    _check(vllm_ranks, Case(pp=2, gen_tp=2), family, tmp_path, sleeps=True)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_whole_experts_are_those_of_vllm(vllm_ranks: Ranks, family: str, tmp_path: Path) -> None:
    _check(vllm_ranks, Case(pp=2, gen_tp=2), family, tmp_path, sleeps=True, whole_experts=True)


def _kv_cache_held(case: Case, folder: str) -> tuple[int, int]:
    """Bytes of the KV cache in generation, and what the sequences can fill."""
    from vllm.device_allocator.cumem import CuMemAllocator

    from megarl.rollout.vllm.checks import BLOCK_SIZE

    arch = read_architecture(folder)
    rollout = {"name": "vllm", "max_num_seqs": 16, "gpu_memory_utilization": 0.3, "enforce_eager": True}
    config = {"model": {"path": folder, "dtype": "bfloat16"}, "rollout": rollout}
    with actor_in(Case(**{**vars(case), "config": config}), arch, "bfloat16") as actor:
        hybrid = hybrid_of(actor, max_model_len=64)
        with hybrid.phase():
            pool = CuMemAllocator.get_instance().pointer_to_data.values()
            held = sum(data.handle[1] for data in pool if data.tag == "kv_cache")
        hybrid.close()
    attention = arch.layer(0).attention
    heads = attention.num_key_value_heads // case.gen_tp
    return held, 16 * BLOCK_SIZE * 2 * arch.num_layers * heads * attention.head_dim * 2


def test_the_kv_cache_is_no_larger_than_its_sequences(vllm_ranks: Ranks, tmp_path: Path) -> None:
    """vLLM's allocator gives memory out in pieces of 2 to 20 MiB; a third of the GPU would be tens of GiB."""
    folder = _folder("llama", tmp_path / "llama")
    for held, useful in vllm_ranks.run(1, _kv_cache_held, Case(gen_tp=1), folder):
        assert useful <= held < useful + 64 * 2**20

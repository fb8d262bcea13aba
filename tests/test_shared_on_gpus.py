"""Engines with CUDA graphs on the actor's own parameters: bits, log-probabilities, and the memory they do not take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from shared_cases import generate_with_shared_weights
from training_cases import Case, actor_in, hybrid_of

from megarl.models.families import read_architecture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")

ENGINES = [
    "native",
    pytest.param("vllm", marks=pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")),
]
LAYOUTS = [Case(gen_tp=1), Case(tp=2, sequence_parallel=True, gen_tp=2), Case(pp=2, gen_tp=1)]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Ranks of their own for every test: a second engine in a process dies with vLLM's sleep mode."""
    pool = Ranks()
    yield pool
    pool.close()


def _in_folder(case: Case, engine: str, folder: Path, **sizes: Any) -> tuple[Case, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    rollout = {"name": engine, "tensor_model_parallel_size": case.gen_tp, "max_num_seqs": 16}
    config = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "actor": {"megatron": {"sequence_parallel": case.sequence_parallel}},
        "rollout": rollout | {"gpu_memory_utilization": 0.05, "max_num_batched_tokens": 64},
        "reshard": {"verify": True},
    }
    return Case(**{**vars(case), "config": config}), read_architecture(str(folder))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: f"{case.name}-to-tp{case.gen_tp}")
def test_graphs_read_weights_that_change_in_place(fresh_ranks: Ranks, case: Case, engine: str, tmp_path: Path) -> None:
    """Three times: new weights, wake, bits compared, generate, sleep (vLLM's level 2)."""
    case, arch = _in_folder(case, engine, tmp_path)
    for seen in fresh_ranks.run(case.world, generate_with_shared_weights, case, arch, "bfloat16", True):
        assert seen.gap < 0.05  # bf16 has 8 bits
        assert len(set(map(str, seen.completions))) == 3
        assert (seen.received > 0) == (case.pp > 1)
        if case.pp == 1:
            assert seen.own and all("qkv_proj" in name for name in seen.own)


def _memory(case: Case, arch: Any, engine: str) -> tuple[int, int, int]:
    """Bytes of the engine's weights, of those that are its own, and of what it took for them at most."""
    with actor_in(case, arch, "bfloat16") as actor:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hybrid = hybrid_of(actor, max_model_len=64)
        taken = torch.cuda.max_memory_allocated() - before
        with hybrid.phase():
            held = hybrid.engine.parameters()
            if engine == "vllm":
                from vllm.device_allocator.cumem import CuMemAllocator

                pool = CuMemAllocator.get_instance().pointer_to_data.values()
                taken = sum(data.handle[1] for data in pool if data.tag == "weights")
            whole = sum(p.nbytes for p in held.values())
            own = sum(p.nbytes for name, p in held.items() if name not in hybrid.sync.shared.places)
        hybrid.close()
        return whole, own, taken


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", LAYOUTS[:2], ids=lambda case: f"{case.name}-to-tp{case.gen_tp}")
def test_no_second_copy(fresh_ranks: Ranks, case: Case, engine: str, tmp_path: Path) -> None:
    """Not even while the engine is built. vLLM's allocator gives memory out in pieces of 2 to 20 MiB."""
    case, arch = _in_folder(case, engine, tmp_path, hidden_size=1024, intermediate_size=32_768, vocab_size=16_384)
    for whole, own, taken in fresh_ranks.run(case.world, _memory, case, arch, engine):
        assert own < 0.05 * whole
        assert own <= taken < own + 64 * 2**20 < 0.5 * whole

"""Memory modes on GPUs: bytes that are really free, and copies that run beside the computation."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import changed
from ranks import Ranks
from torch import Tensor
from training_cases import (
    ARCH,
    Case,
    actor_in,
    fixed_batch,
    hybrid_of,
    mini_batch_of,
    reference_of,
    update,
)

from megarl.parallel.deterministic import deterministic

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")

LARGER = changed(
    ARCH,
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=32_768,
)
"""155 million parameters, so that copies take milliseconds."""
MODES = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
ROLLOUT = {"max_num_seqs": 4, "gpu_memory_utilization": 0.1, "max_num_batched_tokens": 64}


def _settings(dtype: str, *, moving: bool) -> dict[str, Any]:
    return {
        "model": {"dtype": dtype},
        "actor": {"megatron": MODES if moving else {}, "use_kl_loss": True},
        "ref": {"megatron": {"param_offload": moving}},
        "rollout": ROLLOUT,
    }


def _state(actor: Any, reference: Any) -> dict[str, Tensor]:
    """Everything that moves and is kept, on the host."""
    state = {f"weight {name}": p for name, p in actor.parameters().items()}
    state |= {f"reference {name}": p for name, p in reference.parameters().items()}
    state |= {f"{name} {i}": t for name, held in actor.optimizer.tensors().items() for i, t in enumerate(held)}
    return {name: t.detach().cpu().clone() for name, t in state.items()}


def _one_step(case: Case, dtype: str, moving: bool) -> dict[str, Any]:
    """Bytes in generation after an update, and the names of what was not the same when it came back."""
    from megarl.phases import Phase

    gc.collect()  # the job before left cycles that hold its memory
    torch.cuda.empty_cache()
    with actor_in(replace(case, config=_settings(dtype, moving=moving)), LARGER, dtype, lr=1e-3) as actor:
        reference = reference_of(actor)
        hybrid = hybrid_of(actor, max_model_len=64, reference=reference)
        batch, mini_batch = fixed_batch(), mini_batch_of(actor)
        update(actor, batch)
        actor.gather_parameters()
        reference.gather_parameters()
        kept = _state(actor, reference)
        differs = set()
        for _ in range(2):
            with hybrid.phase():
                held = torch.cuda.memory_allocated()
            hybrid.residency.enter(Phase.LOG_PROBS)
            actor.log_probs(batch, mini_batch)
            reference.gather_parameters()
            actor.optimizer.masters.restore()
            actor.optimizer.moments.restore()
            differs |= {name for name, t in _state(actor, reference).items() if not torch.equal(t, kept[name])}
        metrics = update(actor, batch)
        hybrid.close()
        assert metrics["grad_norm"] > 0
        return {"held": held, "differs": differs}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [Case(), Case(dp=2)], ids=lambda case: case.name)
def test_generation_holds_what_the_budget_says_and_all_comes_back(ranks: Ranks, case: Case, dtype: str) -> None:
    from megarl.config import build_config
    from megarl.estimate.accelerator import H200
    from megarl.estimate.budget import budget
    from megarl.estimate.job import Job
    from megarl.parallel.layout import GenerationLayout, TrainLayout

    predicted, held = {}, {}
    for moving in (False, True):
        config = build_config(
            {
                "data": {"max_prompt_length": 32, "max_response_length": 32},
                "actor_rollout_ref": _settings(dtype, moving=moving),
                "trainer": {"n_gpus_per_node": case.world},
            }
        )
        train, generation = TrainLayout(ranks=range(case.world)), GenerationLayout(ranks=range(case.world))
        job = Job(config=config, arch=LARGER, train=train, generation=generation, reference=True)
        predicted[moving] = budget(job, H200, moved=0)[0].total("generate")
        found = ranks.run(case.world, _one_step, case, dtype, moving)
        held[moving] = max(rank["held"] for rank in found)
        for rank in found:
            assert rank["differs"] == set()
    assert held[False] - held[True] == pytest.approx(predicted[False] - predicted[True], rel=0.05)
    assert held[True] < 0.3 * held[False]


def test_steps_with_every_mode_equal_those_without(ranks: Ranks) -> None:
    """As on CPU ranks, in algorithms that give the same bits twice."""
    from test_offload import MODES, _same, _with_modes

    plain, moving = (ranks.run(1, _reproducible, _with_modes(Case(), modes, {}))[0] for modes in ((), MODES))
    for a, b in zip(moving, plain, strict=True):
        assert _same(a, b)


def _reproducible(case: Case) -> list[Any]:
    from test_offload import _train

    with deterministic(True):
        seen: list[Any] = _train(case, ARCH, "bfloat16")["seen"]
        return seen


def _checkpoint(case: Case) -> tuple[float, float]:
    """GiB that a checkpoint takes on the GPU at most, and that reading one does."""
    with actor_in(case, LARGER, "bfloat16", lr=1e-3) as actor:
        update(actor, fixed_batch())
        actor.gather_parameters()
        taken = []
        for loading in (False, True):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            state = actor.sharded_state(loading=loading)
            taken.append((torch.cuda.max_memory_allocated() - before) / 2**30)
            del state
        return taken[0], taken[1]


@pytest.mark.parametrize("case", [Case(), Case(dp=2)], ids=lambda case: case.name)
def test_a_checkpoint_takes_one_parameter_at_a_time(ranks: Ranks, case: Case) -> None:
    """The optimizer's whole state would take twelve bytes per parameter."""
    largest = 4 * LARGER.vocab_size * LARGER.hidden_size / 2**30
    for saving, loading in ranks.run(case.world, _checkpoint, case):
        assert 0 < saving < 1.5 * largest
        assert loading < 0.1 * largest

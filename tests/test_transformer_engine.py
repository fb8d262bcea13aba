"""Transformer Engine's layers against torch's: the same weights, bf16, on GPUs that have it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import changed
from ranks import Ranks
from small_state import STATE, rl_step
from training_cases import (
    ARCH,
    SINKS,
    SOME_WITH_EXPERTS,
    WIDE,
    WIDE_WITH_EXPERTS,
    WITH_EXPERTS,
    Case,
    actor_in,
    fixed_batch,
    hybrid_of,
    mini_batch_of,
    same_again,
    save_checkpoint,
    update,
)

from megarl.models.architecture import Architecture
from megarl.models.parts.rotary import RopeScaling, Yarn

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None,
    reason="needs a GPU and Transformer Engine",
)


def _train_and_generate(
    case: Case, which: str, arch: Architecture, shared: bool
) -> tuple[bool, torch.Tensor, list[float], float]:
    """Log-probs before, losses of 3 updates, and the engine's largest log-prob gap after them."""
    from megarl.types import Prompt, SamplingParams

    megatron = {"transformer_engine": which, "sequence_parallel": case.sequence_parallel}
    config = {
        "actor": {"megatron": megatron},
        "rollout": {"tensor_model_parallel_size": case.gen_tp},
        "reshard": {"verify": True},
        "model": {"dtype": "bfloat16", "use_prefix_grouper": shared},
    }
    with actor_in(replace(case, config=config), arch, "bfloat16", lr=1e-3) as actor:
        batch = fixed_batch()
        before = actor.log_probs(batch, mini_batch_of(actor, 4))
        losses = [update(actor, batch, size=4)["loss"] for _ in range(3)]
        hybrid = hybrid_of(actor, max_model_len=32)
        prompts = [Prompt(index=i, token_ids=(3 + i, 5, 7), row={}) for i in range(4)]
        with hybrid.phase():
            rollouts = hybrid.rollouts(prompts, 4, SamplingParams(max_tokens=9), seed=1, round_=1)
        made = rollouts.to_batch()
        logp = actor.log_probs(made, actor.plan(made))
        assert made.rollout_logp is not None
        return actor.layers.names.fused_norms, before, losses, float((logp - made.rollout_logp).abs().mean())


LLAMA3 = RopeScaling(factor=8.0, original_max_position_embeddings=16)
YARN = Yarn(factor=4.0, original_max_position_embeddings=16)


def _compare(ranks: Ranks, case: Case, arch: Architecture, *, shared: bool = False) -> None:
    ours = ranks.run(case.world, _train_and_generate, case, "none", arch, False)[0]
    theirs = ranks.run(case.world, _train_and_generate, case, "auto", arch, shared)[0]
    assert (ours[0], theirs[0]) == (False, True)
    assert float((ours[1] - theirs[1]).abs().mean()) < 0.02  # bf16 has 8 bits
    assert theirs[2] == pytest.approx(ours[2], rel=5e-3)
    assert max(ours[3], theirs[3]) < 0.02


@pytest.mark.parametrize(
    "arch",
    [ARCH, changed(ARCH, rope_scaling=LLAMA3), WITH_EXPERTS, SOME_WITH_EXPERTS],
    ids=["", "rope", "experts", "sigmoid-experts"],
)
@pytest.mark.parametrize(
    "case", [Case(), Case(tp=2, pp=2, gen_tp=2, sequence_parallel=True)], ids=lambda case: case.name
)
def test_transformer_engine_agrees_with_torch(ranks: Ranks, case: Case, arch: Architecture) -> None:
    _compare(ranks, case, arch)


@pytest.mark.parametrize(
    "arch",
    [ARCH, changed(ARCH, rope_scaling=YARN), WITH_EXPERTS, changed(WITH_EXPERTS, qk_norm=True, norm_over_heads=True)],
    ids=["", "yarn", "experts", "norms-over-heads"],
)
@pytest.mark.parametrize(("case", "shared"), [(Case(), True), (Case(cp=2, gen_tp=2), False)], ids=["prompts", "cp2"])
def test_our_attention_in_its_layers_agrees_with_torch(
    ranks: Ranks, case: Case, shared: bool, arch: Architecture
) -> None:
    """Prompts that are computed once, context parallelism, YaRN, and norms over all heads."""
    _compare(ranks, case, arch, shared=shared)


@pytest.mark.parametrize("arch", [WIDE, WIDE_WITH_EXPERTS], ids=["dense", "experts"])
def test_the_first_ratio_is_one(ranks: Ranks, arch: Architecture) -> None:
    """The kernels add up in the same order each time, also where several experts return a token."""
    assert ranks.run(1, same_again, arch, "bfloat16")[0] == (True, 0.0)


@pytest.mark.parametrize("arch", [WITH_EXPERTS, SOME_WITH_EXPERTS], ids=["experts", "sigmoid-experts"])
@pytest.mark.parametrize(
    "case",
    [Case(dp=2, ep=2, gen_tp=2), Case(tp=2, ep=2, etp=1, gen_tp=2, sequence_parallel=True)],
    ids=lambda case: case.name,
)
def test_experts_over_ranks_agree_with_torch(ranks: Ranks, case: Case, arch: Architecture) -> None:
    """All-to-all over NCCL, and each rank's experts in one grouped GEMM."""
    _compare(ranks, case, arch)


def test_a_bias_of_a_router_is_read_as_it_is(ranks: Ranks) -> None:
    """Its logits are float32, and its bias is not; the engine computes them by itself."""
    assert ranks.run(1, _train_and_generate, Case(), "auto", SINKS, False)[0][3] < 0.02


def _save_read_and_save(run_dir: str, case: Case, arch: Architecture) -> list[bool]:
    """Save what Transformer Engine's layers trained, read it into torch's, and save that: tell which tensors agree."""
    from megatron.core import dist_checkpointing

    from megarl.checkpoint.store import load_checkpoint

    folders: list[str] = []
    for which in ("auto", "none"):
        config = {"actor": {"megatron": {"transformer_engine": which, "sequence_parallel": True}}}
        with actor_in(replace(case, config=config), arch, "bfloat16", lr=1e-3) as actor:
            world = actor.groups.world
            if folders:
                read = load_checkpoint(folders[0], {"actor": actor.sharded_state(loading=True)}, rng=True, world=world)
                actor.load_sharded(read["actor"])
            else:
                update(actor, fixed_batch(), size=4)
            state: dict[str, Any] = {"actor": actor.sharded_state(loading=False)}
            place = rl_step(len(folders) + 1)
            folders.append(save_checkpoint(run_dir, place, state, STATE, model_files=lambda folder: None, world=world))
    first, second = map(dist_checkpointing.load_plain_tensors, folders)
    tensors = {key for key in first if isinstance(first[key], torch.Tensor)}
    assert tensors == {key for key in second if isinstance(second[key], torch.Tensor)}
    return [torch.equal(first[key], second[key]) for key in sorted(tensors)]


@pytest.mark.parametrize("arch", [ARCH, SOME_WITH_EXPERTS], ids=["dense", "experts"])
def test_torch_layers_read_what_it_saves(ranks: Ranks, tmp_path: Path, arch: Architecture) -> None:
    case = Case(tp=2, gen_tp=2, sequence_parallel=True)
    agree = ranks.run(case.world, _save_read_and_save, str(tmp_path), case, arch)[0]
    assert len(agree) > 20 and all(agree)

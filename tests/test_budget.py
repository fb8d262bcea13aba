"""Bytes per phase against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from architectures import changed
from considered_jobs import (
    DEEPSEEK_V3,
    GEMMA_3_1B,
    GLM_45_AIR,
    GPT_OSS_20B,
    LLAMA_3_8B,
    MOONLIGHT,
    QWEN3_235B,
    QWEN3_NEXT_80B,
    job,
)
from reshard_cases import EXPERTS, architecture
from rich.console import Console
from rich.table import Table
from training_cases import LATENT, LINEAR, NORMS_BEHIND, SINKS, SOME_WITH_EXPERTS, WINDOWS

from megarl.estimate.accelerator import H200
from megarl.estimate.budget import (
    budget,
    cache_room,
    engine_activations,
    host_bytes,
    reshard_buffers,
)
from megarl.estimate.budget_table import measured_table, size
from megarl.estimate.fit import what_does_not_fit, what_leaves_little, what_may_not_fit
from megarl.estimate.job import (
    Job,
    active_parameter_count,
    engine_elements,
    expert_elements,
    own_engine_elements,
    parameter_count,
    training_elements,
)
from megarl.estimate.model_memory import layers_in_flight
from megarl.models.architecture import Architecture
from megarl.models.sizes import (
    BLOCK_SIZE,
    attention_flops,
    kv_bytes_per_token,
    layer_activations,
    native_activation_bytes,
    prefill_activations,
    state_bytes,
)
from megarl.models.tensors import volume
from megarl.models.weights import engine_placements, logical_tensors, training_placements
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout
from megarl.phases import Item, Phase
from megarl.reshard.sharing import plan_shared
from megarl.role_kinds import ACTOR, REFERENCE

# Llama-3-8B over TP2 x PP2: half of 16 layers and of an embedding; and norms, which every rank has
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336
FIRST_STAGE = 16 * (LAYER // 2 + 2 * 4096) + 128_256 * 4096 // 2
# of it what a TP2 engine reads in place: all but the queries, keys and values
SHARED = FIRST_STAGE - 16 * (4096 + 2 * 1024) * 4096 // 2
GIB = 2**30


def test_parameter_counts() -> None:
    assert parameter_count(LLAMA_3_8B) == 32 * (LAYER + 2 * 4096) + 2 * 128_256 * 4096 + 4096 == 8_030_261_248
    assert parameter_count(LLAMA_3_8B) - active_parameter_count(LLAMA_3_8B) == 128_256 * 4096
    assert parameter_count(QWEN3_235B) / 1e9 == pytest.approx(235.1, abs=0.1)
    assert active_parameter_count(QWEN3_235B) / 1e9 == pytest.approx(22, abs=0.5)  # "A22B", with the look-up
    assert parameter_count(GLM_45_AIR) / 1e9 == pytest.approx(106, abs=1)
    assert active_parameter_count(GLM_45_AIR) / 1e9 == pytest.approx(12, abs=1)
    assert parameter_count(DEEPSEEK_V3) / 1e9 == pytest.approx(671, abs=0.1)
    assert active_parameter_count(DEEPSEEK_V3) / 1e9 == pytest.approx(37, abs=1)
    assert parameter_count(MOONLIGHT) / 1e9 == pytest.approx(16, abs=0.1)
    assert parameter_count(GEMMA_3_1B) == 999_885_952
    assert parameter_count(GPT_OSS_20B) / 1e9 == pytest.approx(20.91, abs=0.01)
    assert active_parameter_count(GPT_OSS_20B) / 1e9 == pytest.approx(3.61, abs=0.01)
    assert expert_elements(GPT_OSS_20B) / 1e9 == pytest.approx(19.12, abs=0.01)
    assert parameter_count(QWEN3_NEXT_80B) / 1e9 == pytest.approx(79.67, abs=0.01)
    assert active_parameter_count(QWEN3_NEXT_80B) / 1e9 == pytest.approx(3.56, abs=0.01)  # "A3B"; 3.87 with the look-up
    for arch in (
        LLAMA_3_8B,
        SOME_WITH_EXPERTS,
        WINDOWS,
        NORMS_BEHIND,
        SINKS,
        LATENT,
        LINEAR,
        architecture(num_layers=2, tied=True, qkv_bias=True, moe=EXPERTS),
    ):
        assert parameter_count(arch) == sum(volume(t.box) for t in logical_tensors(arch).values())


def test_latent_attention_in_numbers() -> None:
    """What is cached of a token, on any number of ranks, and the FLOPs of a sequence of 10 tokens."""
    assert kv_bytes_per_token(DEEPSEEK_V3, tp=1, itemsize=2) == kv_bytes_per_token(DEEPSEEK_V3, tp=8, itemsize=2)
    assert kv_bytes_per_token(DEEPSEEK_V3, tp=8, itemsize=2) == 61 * (512 + 64) * 2
    half_of_scores, half_of_values = 10 * 10 * 128 * (128 + 64), 10 * 10 * 128 * 128
    assert attention_flops(DEEPSEEK_V3, 10, 10**2) == 61 * (half_of_scores + half_of_values)


def test_linear_attention_in_numbers() -> None:
    """A quarter of the layers has a KV cache; the others keep 32 matrices, and three tokens before the convolution."""
    assert kv_bytes_per_token(QWEN3_NEXT_80B, tp=1, itemsize=2) == 12 * 2 * 2 * 256 * 2
    layer = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
    assert state_bytes(QWEN3_NEXT_80B, tp=2, max_num_seqs=64) == 4 * layer // 2 * (65 * 36 + 64)
    per_token = 32 * (6 * 128 * 128 + 64 * 8 * 128)  # and 2 per query channel and token seen, in every fourth layer
    assert attention_flops(QWEN3_NEXT_80B, 10, 10**2) == 36 * 10 * per_token + 12 * 2 * 10**2 * 16 * 256


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    "arch",
    [
        LLAMA_3_8B,
        architecture(num_layers=4, tied=True, moe=EXPERTS),
        architecture(num_layers=5, qk_norm=True),
        SOME_WITH_EXPERTS,
        WINDOWS,
        NORMS_BEHIND,
        SINKS,
        LATENT,
        LINEAR,
    ],
    ids=["8B", "tiny", "uneven", "two kinds", "windows", "norms behind", "sinks", "latent", "linear"],
)
def test_elements_are_those_of_the_placements(arch: Architecture, chunks: int) -> None:
    layout = TrainLayout(ranks=range(4), tp=2, pp=2, chunks=chunks)
    for rank in range(4):
        held = training_placements(arch, layout, rank)
        assert training_elements(arch, layout, rank) == sum(volume(p.box) for p in held)
    for ep in (1, 2) if arch.moe and arch.moe.num_experts % 2 == 0 else (1,):
        split = TensorSplit(tp=2, ep=ep)
        assert engine_elements(arch, split) == sum(volume(p.box) for p in engine_placements(arch, split, 0))


def test_the_table_of_an_8b_model() -> None:
    stages = budget(job(), H200, moved=4 * 10**9)
    first, last = stages
    resident = {
        "CUDA context, NCCL": 4 * GIB,
        "training weights": 2 * FIRST_STAGE,
        "gradients": 4 * FIRST_STAGE,
        "optimizer state": 12 * FIRST_STAGE // 2,  # two data-parallel ranks
    }
    per_token = 2 * 4096 + 5120 + 21_504  # elements a layer keeps, over TP2 with sequence parallelism
    assert layer_activations(LLAMA_3_8B, TensorSplit(tp=2), sequence_parallel=True) == per_token
    assert first.phases["log_probs"] == resident | {"activations": 2 * 8192 * per_token}
    assert first.phases["update"] == resident | {"activations": 2 * 8192 * 2 * 16 * per_token}  # two micro-batches

    engine = LAYER * 32 + 2 * 128_256 * 4096
    weights = {"engine weights": 2 * (engine // 2 + 65 * 4096 - SHARED)}
    assert first.phases["reshard"] == resident | weights | {"reshard buffers": 8 * (4 * 10**9 // 2**14)}
    prefill = 4 * 4096 + 5120 + 21_504
    activations = 2 * 8192 * prefill + (3 * 4 * 256 + 48 * 32) * 128_256
    tokens = 256 * 4096 + 128  # of 2 x 32 layers x 4 heads x 128 x 2 bytes; a block is vLLM's own
    assert 65_536 * tokens < H200.memory // 2 - weights["engine weights"] - activations
    assert first.phases["generate"] == resident | weights | {
        "KV cache": 65_536 * tokens,
        "engine activations": activations,
    }

    vocabulary = 128_256 // 2
    assert last.phases["update"]["activations"] == 2 * 8192 * 16 * per_token
    assert last.phases["update"]["logits of a chunk"] == min(2**29, 2 * 8192 * vocabulary)
    assert last.phases["update"]["training weights"] == 2 * (FIRST_STAGE + 4096)
    assert last.phases["generate"]["engine weights"] == weights["engine weights"] - 2 * 4096  # the final norm
    (apart, _) = budget(job(actor__megatron__param_offload=True), H200, moved=4 * 10**9)
    assert apart.phases["generate"]["engine weights"] == weights["engine weights"] + 2 * SHARED
    assert first.peak == first.total("generate") > last.total("update")


def test_measured_beside_predicted() -> None:
    """The prediction is that of the fullest stage; a phase without one is shown all the same."""
    stages = budget(job(), H200, moved=1)
    most = {phase: max(stage.total(phase) for stage in stages) for phase in (Phase.UPDATE, Phase.LOG_PROBS)}
    console = Console(width=100)
    with console.capture() as shown:
        measured = {
            Phase.OFFLOAD: 3 * GIB,
            Phase.UPDATE: most[Phase.UPDATE] + 2**20,
            Phase.LOG_PROBS: most[Phase.LOG_PROBS] - GIB,
        }
        console.print(measured_table(stages, measured, H200))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.get().splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["offload"] == ["", "3.00 GiB", ""]
    assert rows["update"] == [size(most[Phase.UPDATE]), size(most[Phase.UPDATE] + 2**20), "1 MiB"]
    assert rows["log_probs"] == [size(most[Phase.LOG_PROBS]), size(most[Phase.LOG_PROBS] - GIB), "-1.00 GiB"]


def test_switches() -> None:
    def update(**changes: object) -> dict[str, int]:
        return budget(job(**changes), H200, moved=1)[0].phases["update"]  # type: ignore[arg-type]

    per_token = 2 * 4096 + 5120 + 21_504
    recomputed = update(model__enable_gradient_checkpointing=True)
    assert recomputed["activations"] == 2 * 8192 * (2 * 16 * 2048 + per_token)
    offloaded = {"model__enable_gradient_checkpointing": True, "model__enable_activation_offload": True}
    assert update(**offloaded)["activations"] == 2 * 8192 * (2048 + per_token)
    some = update(model__recompute_modules=["mlp"])["activations"]
    assert some == 2 * 8192 * ((2 * 16 - 1) * (per_token - 21_504) + per_token)
    with_inputs, without = (host_bytes(job(**changes), 0) for changes in (offloaded, {}))
    assert with_inputs - without == 2 * 8192 * 2 * 16 * 2048
    of_three = {**offloaded, "actor__use_dynamic_bsz": False, "actor__ppo_micro_batch_size_per_gpu": 3}
    assert 2 * 3 * 4096 * 2048 < 2**26 and host_bytes(job(**of_three), 0) - without == 2 * 16 * 2**26  # as it is pinned
    shared = update(model__use_prefix_grouper=True)["activations"] - update()["activations"]
    keys = 8 * 4096 / (1024 + 8 * 3072)  # for each token that is computed
    assert shared == pytest.approx(2 * 8192 * 2 * 16 * keys * 2 * 4 * 128)
    assert update(actor__megatron__transformer_engine="none") == update()
    assert update(model__dtype="float32")["optimizer state"] == 8 * FIRST_STAGE // 2
    assert update(actor__megatron__use_distributed_optimizer=False)["optimizer state"] == 12 * FIRST_STAGE
    assert update(actor__use_kl_loss=True)["reference weights"] == 2 * FIRST_STAGE
    assert "KV cache" in update(rollout__free_cache_engine=False)
    assert update(actor__use_dynamic_bsz=False, actor__ppo_micro_batch_size_per_gpu=3)["activations"] == (
        2 * 3 * 4096 * 2 * 16 * per_token
    )


@pytest.mark.parametrize(
    "layout",
    [
        dict(gpus=4, tp=4, pp=1, generation_tp=4),
        dict(gpus=8, tp=2, pp=2, generation_tp=2),
        dict(gpus=8, tp=1, pp=2, generation_tp=4, chunks=2),
        dict(gpus=4, tp=4, pp=1, generation_tp=2),
        dict(gpus=6, tp=2, pp=3, generation_tp=2),  # 1, 2 and 1 layers
        dict(gpus=4, tp=1, pp=1, generation_tp=2, generation_ep=2),
        dict(gpus=8, tp=2, pp=2, generation_tp=4, generation_ep=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["vllm", "native"])
def test_own_engine_weights_are_those_of_the_rank_with_most(layout: dict[str, int], name: str) -> None:
    arch = architecture(
        num_layers=4, vocab_size=150, tied=True, num_key_value_heads=4, moe=replace(EXPERTS, num_experts=4)
    )
    considered = job(arch, **layout, rollout__name=name)
    train, split = considered.train, considered.generation.split
    rows = 192 // split.tp if name == "vllm" else -(-150 // split.tp)
    for stage in range(train.pp):
        own = []
        for rank in (r for r in train.ranks if train.coords(r).pp == stage):
            shared = plan_shared(considered.training, considered.engines, rank)
            wanted = engine_placements(arch, split, considered.generation.coords(rank).tp, vocab_rows=rows)
            own.append(sum(volume(p.box) for p in wanted if p.param not in shared))
        assert own_engine_elements(considered, stage) == max(own)


def test_layers_in_flight() -> None:
    assert [layers_in_flight(job(pp=4, tp=1).actor, stage) for stage in range(4)] == [4 * 8, 3 * 8, 2 * 8, 8]
    # 2 x 3 + 4 + 1 of the chunks of 4 layers, 2 x 2 + 5, ...; the paper's L (1 + (p - 1) / (p m)) for the first stage
    assert [layers_in_flight(job(pp=4, tp=1, chunks=2).actor, stage) for stage in range(4)] == [44, 36, 28, 20]
    assert [layers_in_flight(job(QWEN3_235B, pp=4, tp=1).actor, stage) for stage in range(4)] == [92, 72, 48, 23]
    few = dict(actor__ppo_mini_batch_size=2, actor__use_dynamic_bsz=False)  # 8 sequences a rank: one micro-batch
    assert layers_in_flight(job(pp=4, tp=1, **few).actor, 0) == 8


def test_experts_keep_the_activations_of_every_copy_of_a_token() -> None:
    dense, shares, whole = 4 * 4096 / 4 + 2 * (64 + 4) * 128 / 4, TensorSplit(tp=4), TensorSplit(tp=4, ep=4)
    assert layer_activations(QWEN3_235B, shares, sequence_parallel=True) == dense + 8 * (2 * 4096 + 3 * 1536 / 4)
    more = prefill_activations(QWEN3_235B, whole) - prefill_activations(QWEN3_235B, shares)
    assert more == 8 * 4 * 1536 * 3 // 4  # all tokens may go to the experts of one rank


@pytest.mark.parametrize("arch", [LLAMA_3_8B, QWEN3_235B], ids=["dense", "experts"])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_native_engine_counts_with_no_less_than_a_layer_keeps(arch: Architecture, tp: int) -> None:
    split = TensorSplit(tp=tp)
    assert prefill_activations(arch, split) >= layer_activations(arch, split, sequence_parallel=False)


def test_the_native_engine_computes_long_prompts_in_parts() -> None:
    """With keys and values of 4 KV heads of 128, read and put in order; attention sinks want the whole prompt."""
    layer = 6 * 4096 + 8 * 2048 + 4 * 7168
    sampler = (2 * 256 * (2 + 4) + 48 * 32) * 128_256
    assert engine_activations(job(rollout__name="native")) == 2 * 8192 * layer + sampler
    short = dict(split=TensorSplit(tp=2), itemsize=2, max_num_seqs=256, max_num_batched_tokens=10, max_model_len=4096)
    assert native_activation_bytes(LLAMA_3_8B, **short) == 2 * (10 * layer + 4096 * 2 * 2 * 4 * 128) + sampler
    whole = replace(LLAMA_3_8B, layers=((LLAMA_3_8B.layers[0][0].with_attention(sinks=True), 32),))
    assert native_activation_bytes(whole, **short) == 2 * 4096 * layer + sampler


def test_kv_caches() -> None:
    native = job(rollout__name="native", rollout__max_num_seqs=10)
    assert native.kv_bytes_per_token == 65_536
    cache = cache_room(native, H200)
    assert (cache.tokens, cache.sequences, cache.bytes) == (10 * 4096, 10, (10 * 4096 + 16) * 65_536)
    many = job(rollout__max_num_seqs=1000)
    left = H200.memory // 2 - 2 * own_engine_elements(many, 0) - engine_activations(many)
    tokens = (left // (128 * 65_536) - 1) * 128
    cache = cache_room(many, H200)
    assert (cache.tokens, cache.sequences) == (tokens, tokens // 4096) and tokens < 1000 * 4096
    none = cache_room(job(actor__megatron__param_offload=True, rollout__gpu_memory_utilization=0.05), H200)
    assert (none.bytes, none.tokens, none.sequences) == (0, 0, 0)
    assert job(QWEN3_235B, generation_tp=8).kv_bytes_per_token == 2 * 94 * 128 * 2  # a KV head on two ranks


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize(
    "arch",
    [
        LLAMA_3_8B,
        changed(QWEN3_235B, num_layers=4),
        replace(QWEN3_NEXT_80B, layers=QWEN3_NEXT_80B.layers[:4]),
    ],
    ids=["dense", "experts", "linear"],
)
def test_the_native_engine_takes_the_cache_that_is_predicted(
    monkeypatch: pytest.MonkeyPatch, arch: Architecture, share: float
) -> None:
    import torch

    from megarl.rollout.native.cache_size import cache_blocks

    settings: dict[str, object] = {"rollout__name": "native", "rollout__gpu_memory_utilization": share}
    considered = job(arch, gpus=1, tp=1, pp=1, generation_tp=1, **settings)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (H200.memory, H200.memory))
    rollout = considered.config.actor_rollout_ref.rollout
    blocks = cache_blocks(
        arch,
        considered.generation.split,
        tp_group=None,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_model_len=4096,
        weight_bytes=2 * own_engine_elements(considered, 0),
        gpu_memory_utilization=share,
    )
    cache = cache_room(considered, H200)
    assert cache.bytes == blocks * BLOCK_SIZE * considered.kv_bytes_per_token
    assert cache.tokens == (blocks - 1) * BLOCK_SIZE


MODES: dict[str, object] = {
    "actor__megatron__param_offload": True,
    "actor__megatron__grad_offload": True,
    "actor__megatron__optimizer_offload": True,
    "ref__megatron__param_offload": True,
    "actor__use_kl_loss": True,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_modes_move_what_they_say(dtype: str) -> None:
    """Bytes of weights, gradients, optimizer state and reference by phase, in the order of the table."""
    considered = job(model__dtype=dtype, **MODES)
    itemsize, optimizer = (2, 6) if dtype == "bfloat16" else (4, 4)
    weights, gradients, optimizer = itemsize * FIRST_STAGE, 4 * FIRST_STAGE, optimizer * FIRST_STAGE
    held = {
        "reshard": [weights, 0, 0, 0],
        "generate": [0, 0, 0, 0],
        "log_probs": [weights, 0, optimizer, weights],
        "ref": [weights, 0, optimizer, weights],
        "update": [weights, gradients, optimizer, 0],
    }
    stage = budget(considered, H200, moved=1)[0]
    state = ("training weights", "gradients", "optimizer state", "reference weights")
    assert {phase: [items[item] for item in state] for phase, items in stage.phases.items()} == held
    assert host_bytes(considered, 0) == optimizer + weights + (weights if dtype == "float32" else 0)
    assert host_bytes(job(actor__use_kl_loss=True), 0) == 0


STATE = {
    ("actor", Item.WEIGHTS): "training weights",
    ("actor", Item.GRADIENTS): "gradients",
    ("actor", Item.OPTIMIZER): "optimizer state",
    ("reference", Item.WEIGHTS): "reference weights",
}


KINDS = {"actor": ACTOR, "reference": REFERENCE}


def _absent() -> dict[tuple[str, Item], set[Phase]]:
    """The predicted phases in which an item is not on the GPU, with all memory modes on."""
    phases = budget(job(**MODES), H200, moved=1)[0].phases
    return {key: {phase for phase, items in phases.items() if items[name] == 0} for key, name in STATE.items()}


def test_absences_follow_the_table_of_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = budget(job(**MODES), H200, moved=1)[0].phases.keys()
    table = {(role, item): KINDS[role].absent[item] & predicted for role, item in STATE}
    assert _absent() == table
    for (role, item), phases in table.items():
        for phases_now in (phases | {Phase.LOG_PROBS}, phases - {Phase.GENERATE}):
            with monkeypatch.context() as patch:
                patch.setitem(KINDS[role].absent, item, phases_now)
                assert _absent() == {**table, (role, item): phases_now}


def _said(considered: Job, memory: float) -> tuple[list[str], list[str]]:
    """What cannot fit, and what may not."""
    accelerator = replace(H200, memory=memory)
    stages = budget(considered, accelerator, moved=1)
    return tuple(list(said(considered, accelerator, stages)) for said in (what_does_not_fit, what_may_not_fit))


def test_what_cannot_fit_and_what_would_help() -> None:
    """On the last stage, which has a norm's weights more than the first."""
    assert _said(job(), 139 * GIB) == ([], [])
    last = (FIRST_STAGE + 4096) / GIB
    tight: dict[str, object] = {"rollout__gpu_memory_utilization": 0.9, "rollout__max_num_seqs": 512}
    cache = cache_room(job(**tight), replace(H200, memory=80 * GIB)).bytes / GIB
    own = 2 * own_engine_elements(job(**tight), 1) / GIB
    activations = engine_activations(job(**tight)) / GIB
    assert cache == pytest.approx(0.9 * 80 - own - activations, abs=0.01)
    (certain,), (estimated,) = _said(job(**tight), 80 * GIB)
    assert certain == (
        f"generate needs {12 * last + own + cache - 80:.2f} GiB more than the 80.00 GiB that a rank of "
        f"pipeline stage 2 has; actor.megatron.optimizer_offload=true frees {6 * last:.2f} GiB, "
        f"actor.megatron.grad_offload=true frees {4 * last:.2f} GiB, "
        f"actor.megatron.param_offload=true frees {2 * (last - (SHARED + 4096) / GIB):.2f} GiB, a lower "
        f"rollout.gpu_memory_utilization or rollout.max_num_seqs takes a smaller KV cache"
    )
    assert estimated.startswith(f"generate needs {12 * last + 4 + own + cache + activations - 80:.2f} GiB more than")
    relieved = job(**tight, actor__megatron__optimizer_offload=True)
    (certain,), _ = _said(relieved, 80 * GIB)
    assert f"needs {6 * last + own + cache - 80:.2f} GiB" in certain and "optimizer_offload" not in certain
    assert _said(job(**tight, **MODES), 80 * GIB)[0] == []
    (certain,), _ = _said(job(**tight, **MODES), 20 * GIB)
    assert certain.startswith("update needs ") and certain.endswith("; split the model over more GPUs")


def test_estimates_refuse_nothing() -> None:
    """The native engine takes what is left; activations may turn out to be fewer."""
    certain = 12 * (FIRST_STAGE + 4096) / GIB
    native = job(rollout__name="native", rollout__gpu_memory_utilization=0.9)
    refused, warned = _said(native, 60 * GIB)
    assert refused == [] and warned[0].startswith("generate needs ")
    refused, warned = _said(job(rollout__gpu_memory_utilization=0.4), (certain + 13.6) * GIB)
    assert refused == [] and "GiB more than" in warned[0]


@pytest.mark.parametrize(("free", "said"), [(0.21, []), (0.19, ["update leaves 19.0%"]), (-0.01, [])])
def test_less_than_a_fifth_of_the_memory_is_little(free: float, said: list[str]) -> None:
    stages = budget(job(**MODES, rollout__max_num_seqs=8), H200, moved=1)
    accelerator = replace(H200, memory=max(stage.peak for stage in stages) / (1 - free))
    assert [line[:19] for line in what_leaves_little(job(**MODES), accelerator, stages)] == said


def test_no_room_for_a_sequence() -> None:
    line = (
        "the KV cache has no room for one sequence of 4096 tokens; raise rollout.gpu_memory_utilization or "
        "rollout.tensor_model_parallel_size"
    )
    assert _said(job(rollout__gpu_memory_utilization=0.03), 139 * GIB) == ([line], [line])
    assert _said(job(rollout__gpu_memory_utilization=0.033), 139 * GIB) == ([], [line])


def test_reshard_buffers() -> None:
    """Tiles of 16 KiB within a host, buckets where ranks are on several."""
    assert reshard_buffers(job(), 2**20) == 8 * 64
    assert reshard_buffers(job(gpus=16), 5000) == 2 * 5000
    buckets = job(reshard__transport="collective", reshard__bucket_bytes=1024)
    assert reshard_buffers(buckets, 5000) == 4 * 1024


def test_measured_stands_beside_predicted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After the second step that generates and updates: a validation and a warm-up say less."""
    from megarl.trainer.records import memory_report

    monkeypatch.setattr(memory_report, "this_accelerator", lambda: H200)
    considered = job()
    trainer = considered.config.trainer.model_copy(update={"default_local_dir": str(tmp_path)})
    config = considered.config.model_copy(update={"trainer": trainer})
    shown: list[Table] = []
    said = SimpleNamespace(show=shown.append, say=print, warn=pytest.fail)
    memory = memory_report.MemoryReport(config, LLAMA_3_8B, SimpleNamespace(rank=0), said)  # type: ignore[arg-type]
    memory.predict()
    assert len(shown) == 1 and json.loads((tmp_path / "memory.json").read_text())["bytes"] == H200.memory
    step = {Phase.GENERATE: 20 * GIB, Phase.UPDATE: 30 * GIB}
    for peaks in ({Phase.UPDATE: GIB}, {Phase.UPDATE: GIB}, {Phase.GENERATE: GIB, Phase.VALIDATE: GIB}, step):
        memory.measured([peaks, peaks])
    assert len(shown) == 1
    found = memory.measured([step, step | {Phase.UPDATE: 40 * GIB}])
    assert found == {"memory/generate_gib": 20.0, "memory/update_gib": 40.0}
    memory.measured([step])
    assert [table.title for table in shown[1:]] == ["Peak of GPU memory in the second step, of 139.00 GiB"]

"""Times and traffic against numbers worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from considered_jobs import GEMMA_3_1B, GLM_45_AIR, LLAMA_3_8B, QWEN3_235B, job, slowed, with_output
from tiny_run import ROOT

from megarl.estimate.accelerator import ACCELERATORS, H200
from megarl.estimate.budget import CacheRoom
from megarl.estimate.job import active_parameter_count, active_parameters, engine_elements, parameter_count
from megarl.estimate.model import ModelJob
from megarl.estimate.pipeline import bubble, imbalance, stage_flops
from megarl.estimate.prediction import (
    Lengths,
    forward_flops,
    forward_seconds,
    generation_seconds,
    layout_warnings,
    reshard_of_some_ranks,
    reshard_seconds,
    step_seconds,
    update_seconds,
)
from megarl.models.families import read_architecture
from megarl.parallel.experts import TensorSplit
from megarl.parallel.pipeline_split import PipelineSplit
from megarl.reshard.traffic import Traffic

LENGTHS = Lengths(prompt=1024, response=3072)
ROOM = CacheRoom(bytes=10**11, tokens=10**7, sequences=1000)
NOTHING = Traffic(local=0, shared=0, sent=Counter(), received=Counter())
OUTPUT = 2 * 4096 * (128_256 + 1) * 4096
"""FLOPs of Llama-3-8B's final norm and output layer for a sequence of 4096 tokens."""
LAYERS = forward_flops(LLAMA_3_8B, 4096) - OUTPUT


def test_the_reshard_of_an_8b_model_takes_what_its_bytes_take() -> None:
    """TP2 x PP2 -> TP2 within a node: the other stage's 2.0 billion elements arrive in 10.7 ms."""
    considered = job(gpus=4)
    traffic = reshard_of_some_ranks(considered)
    assert sorted(traffic) == [0, 1, 2, 3]
    assert {moved.received.total() for moved in traffic.values()} == {2_007_629_824, 2_007_633_920}
    seconds = max(reshard_seconds(considered, H200, rank, moved) for rank, moved in traffic.items())
    assert seconds == pytest.approx(2 * 2_007_633_920 / 374e9) == pytest.approx(0.0107, abs=1e-4)


def test_identical_layouts_copy_queries_keys_and_values() -> None:
    """TP1: 1.6 of 16 GB, read and written in 0.76 ms; TP8, with a KV head on each rank: nothing."""
    considered = job(gpus=1, tp=1, pp=1, generation_tp=1)
    (moved,) = reshard_of_some_ranks(considered).values()
    assert (moved.local, moved.received.total()) == (32 * 6144 * 4096, 0)
    assert moved.shared == parameter_count(LLAMA_3_8B) - moved.local
    assert reshard_seconds(considered, H200, 0, moved) == pytest.approx(0.00076, abs=1e-5)
    for moved in reshard_of_some_ranks(job(tp=8, pp=1, generation_tp=8)).values():
        assert (moved.local, moved.received.total()) == (0, 0)


def test_the_slowest_link_bounds_a_reshard() -> None:
    considered = job(gpus=16)
    moved = Traffic(local=10**9, shared=10**9, sent=Counter({1: 10**9}), received=Counter({1: 10**9, 8: 10**9}))
    assert reshard_seconds(considered, H200, 0, moved) == 2e9 / 50e9
    assert reshard_seconds(considered, replace(H200, network_rate=1e15), 0, moved) == 2e9 / 374e9
    assert reshard_seconds(considered, replace(H200, memory_rate=1e9), 0, moved) == 4.0
    moved = Traffic(local=0, shared=0, sent=Counter({9: 10**9}), received=Counter())
    assert reshard_seconds(considered, H200, 0, moved) == 2e9 / 50e9


def test_flops() -> None:
    weights = 2 * 1000 * active_parameter_count(LLAMA_3_8B)
    assert forward_flops(LLAMA_3_8B, 1000) == weights + 2 * 1000**2 * 32 * 4096


def test_flops_with_windows() -> None:
    """22 of 26 layers see 512 tokens: fewer than half of those that the others see on average in 4096."""
    for tokens, seen in ((1000, 1000**2), (4096, 2 * 512 * 4096)):
        weights = 2 * tokens * active_parameter_count(GEMMA_3_1B)
        assert forward_flops(GEMMA_3_1B, tokens) == weights + 2 * (22 * seen + 4 * tokens**2) * 4 * 256


def test_a_stage_has_its_layers_and_the_last_one_the_output() -> None:
    """Of 46 layers the first is dense; the embedding only looks up."""
    considered = job(GLM_45_AIR, gpus=8, tp=2, pp=4).actor
    flops, active = stage_flops(considered, 4096), active_parameters(GLM_45_AIR)
    output = 2 * 4096 * (151_552 + 1) * 4096
    attention = GLM_45_AIR.layer(0).attention.flops(4096, 4096**2)
    layer = {first: 2 * 4096 * active[first] + attention for first in (0, 1)}
    assert flops == pytest.approx([layer[0] + 10 * layer[1], 12 * layer[1], 12 * layer[1], 11 * layer[1] + output])
    assert sum(flops) == pytest.approx(forward_flops(GLM_45_AIR, 4096))
    split = PipelineSplit(pipeline_model_parallel_layout="E|t*20|t*26|L")
    other = stage_flops(replace(considered, layout=replace(considered.layout, split=split)), 4096)
    assert other == pytest.approx([0, layer[0] + 19 * layer[1], 26 * layer[1], output])


def test_the_slowest_stage_sets_the_pace() -> None:
    """94 layers in four stages: 23, 24, 24, and 23 with the output."""
    assert QWEN3_235B.num_layers == 94
    uneven, whole = (job(QWEN3_235B, gpus=8, tp=2, pp=pp, generation_tp=4) for pp in (4, 1))
    seconds = [forward_seconds(one, one.actor, H200, LENGTHS) for one in (uneven, whole)]
    output = 2 * 4096 * (151_936 + 1) * 4096
    layer = (forward_flops(QWEN3_235B, 4096) - output) / 94
    # 512 sequences, two at a time on one data-parallel rank
    waiting = slowed([23 * layer, 24 * layer, 24 * layer, 23 * layer + output], 256)
    assert seconds[0] / seconds[1] == pytest.approx(waiting)


def test_bubbles() -> None:
    assert bubble(job(pp=1).actor, 4096, 256) == 0
    assert bubble(equal_stages(), 4096, 256) == pytest.approx(1 / 65, rel=1e-4)
    # 32 x 8 sequences over two ranks in micro-batches of two: 64; then the first stage waits for the second
    stages = with_output(2, LAYERS, OUTPUT)
    assert bubble(job().actor, 4096, 256) == pytest.approx(1 - 1 / slowed(stages, 64))
    assert bubble(job().actor, 4096, 256, mini_batches=2) == pytest.approx(1 - 1 / slowed(stages, 128))
    assert bubble(job(chunks=2).actor, 4096, 256) == pytest.approx(1 - 1 / slowed(stages, 64, chunks=2))
    assert imbalance(job().actor, 4096) == pytest.approx(1 - sum(stages) / 2 / stages[1])


def equal_stages() -> ModelJob:
    """With one output instead of a vocabulary, so that the last stage has hardly more to do."""
    return replace(job().actor, arch=LLAMA_3_8B.with_scalar_output())


def test_a_decode_step_reads_weights_and_keys() -> None:
    """64 prompts over four replicas, 16 x 8 sequences each; half of them at once read weights longer than they multiply
    by them, all at once the other way round."""
    considered = job()
    flops = 2 * H200.mfu * 989e12
    prefill = 16 * forward_flops(LLAMA_3_8B, 1024) / flops
    keys = 64 * (1024 + 1536) * 65_536 / 4226e9
    weights = 2 * engine_elements(LLAMA_3_8B, TensorSplit(tp=2)) / 4226e9
    one_by_one = 32 * 40e-6 + 64 * 3e-6
    half = replace(ROOM, tokens=64 * (1024 + 1536))
    expected = prefill + 2 * 3072 * (weights + keys + one_by_one)
    assert generation_seconds(considered, H200, LENGTHS, half) == pytest.approx(expected)
    matrices = 128 * 2 * active_parameter_count(LLAMA_3_8B) / flops
    expected = prefill + 3072 * (matrices + 2 * keys + one_by_one + 64 * 3e-6)
    assert matrices > weights and generation_seconds(considered, H200, LENGTHS, ROOM) == pytest.approx(expected)
    assert math.isinf(generation_seconds(considered, H200, LENGTHS, replace(ROOM, tokens=0)))


def test_decoding_few_sequences_leaves_experts_unread() -> None:
    def seconds(n: int) -> float:
        considered = job(QWEN3_235B, gpus=512, tp=4, generation_tp=8, rollout__n=n)
        return generation_seconds(considered, H200, Lengths(prompt=1, response=1000), ROOM)

    keys = 501 * job(QWEN3_235B, generation_tp=8).kv_bytes_per_token / 4226e9
    launches = 1000 * 94 * H200.layer
    all_weights = 1000 * 2 * engine_elements(QWEN3_235B, TensorSplit(tp=8)) / 4226e9
    assert seconds(1) < launches + 0.12 * all_weights  # 8 of 128 experts, and attention
    assert seconds(128) == pytest.approx(launches + all_weights + 1000 * 128 * (keys + 3e-6), rel=0.01)


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "tokens", "sequences", "measured"),
    [
        ("qwen2.5_0.5b", "H100", "native", (128, 60), 1024, 277_495),
        ("qwen2.5_0.5b", "H100", "native", (128, 60), 128, 93_867),
        ("qwen2_1.5b", "H100", "native", (128, 60), 1024, 121_589),
        ("qwen2_1.5b", "H200", "native", (512, 512), 1024, 81_127),
        ("qwen2_1.5b", "H200", "vllm", (512, 512), 1024, 64_171),
        ("qwen2_1.5b", "H200", "native", (512, 512), 128, 41_743),
    ],
)
def test_engines_decode_as_fast_as_predicted(
    model: str, gpu: str, engine: str, tokens: tuple[int, int], sequences: int, measured: float
) -> None:
    """Tokens per second of docs/measured.md: of decode steps alone after prompts of 128 tokens, else of whole phases
    with 64 prompts (of the two with 1,024 sequences it is not recorded how many there were)."""
    arch = read_architecture(str(ROOT / "configs" / "models" / model))
    rollout = {"rollout__name": engine, "rollout__n": sequences // 64, "rollout__max_num_seqs": 1024}
    considered = job(arch, gpus=1, tp=1, pp=1, generation_tp=1, **rollout)
    prompt, response = tokens
    accelerator = ACCELERATORS[gpu]
    seconds = generation_seconds(considered, accelerator, Lengths(prompt=prompt, response=response), ROOM)
    if prompt == 128:
        seconds -= 64 * forward_flops(arch, prompt) / (accelerator.mfu * accelerator.flops["bfloat16"])
    assert sequences * response / seconds == pytest.approx(measured, rel=0.1)


def test_a_step() -> None:
    considered = job(model__enable_gradient_checkpointing=True, actor__use_kl_loss=True)
    seconds = step_seconds(considered, H200, LENGTHS, ROOM, reshard_of_some_ranks(considered))
    assert list(seconds) == ["reshard", "generate", "log_probs", "ref", "update"]
    forward = 512 * forward_flops(LLAMA_3_8B, 4096) / (8 * H200.mfu * 989e12)
    stages = with_output(2, LAYERS, OUTPUT)
    assert seconds["log_probs"] == seconds["ref"] == pytest.approx(forward * slowed(stages, 128))
    assert seconds["update"] == pytest.approx(4 * forward * slowed(stages, 64))


def test_parts_of_a_layer_are_computed_again() -> None:
    kept, again = (
        update_seconds(considered, considered.actor, H200, LENGTHS)
        for considered in (job(), job(model__recompute_modules=["mlp"]))
    )
    mlps = 2 * 4096 * 32 * 3 * 4096 * 14_336 / forward_flops(LLAMA_3_8B, 4096)
    assert again == pytest.approx(kept * (3 + mlps) / 3)


def test_prompts_in_common_are_computed_once() -> None:
    apart, shared = (
        step_seconds(considered, H200, LENGTHS, ROOM, reshard_of_some_ranks(considered))
        for considered in (job(), job(model__use_prefix_grouper=True))
    )
    saved = 7 / 8 * forward_flops(LLAMA_3_8B, 1024) / forward_flops(LLAMA_3_8B, 4096)
    assert shared["update"] == pytest.approx((1 - saved) * apart["update"])
    assert shared["log_probs"] == pytest.approx((1 - saved) * apart["log_probs"])
    assert shared["generate"] == apart["generate"]


@pytest.mark.parametrize(
    ("shared", "most", "measured"), [(False, 8192, 27.2), (True, 8192, 21.0), (True, 16_384, 18.7)]
)
def test_a_step_takes_as_long_as_predicted(shared: bool, most: int, measured: float) -> None:
    """128 prompts of 512 tokens, 8 responses of 512 each, on one H200: docs/measured.md. Half take half as long."""
    arch = read_architecture(str(ROOT / "configs" / "models" / "qwen2_1.5b"))
    settings = {"model__use_prefix_grouper": shared, "actor__ppo_max_token_len_per_gpu": most}
    rollout = {"rollout__name": "native", "rollout__max_num_seqs": 256}
    considered = job(arch, gpus=1, tp=1, pp=1, generation_tp=1, **settings, **rollout)
    seconds = step_seconds(considered, H200, Lengths(prompt=512, response=512), ROOM, {0: NOTHING})
    assert seconds["generate"] + seconds["update"] == pytest.approx(measured / 2, rel=0.1)


def test_a_gpu_waits_for_the_launches_of_small_micro_batches() -> None:
    small, large = (job(pp=1, actor__ppo_max_token_len_per_gpu=most) for most in (4096, 65_536))
    slow = replace(H200, launches=1.0)
    # 512 sequences on four data-parallel ranks, one or sixteen in each micro-batch, through 32 layers
    assert update_seconds(small, small.actor, slow, LENGTHS) == pytest.approx(3 * 128 * 32)
    assert update_seconds(large, large.actor, slow, LENGTHS) == pytest.approx(3 * 8 * 32)
    assert update_seconds(large, large.actor, H200, LENGTHS) == update_seconds(small, small.actor, H200, LENGTHS)


def test_warnings() -> None:
    assert layout_warnings(job(), LENGTHS, ROOM) == []
    assert layout_warnings(job(gpus=16, tp=16, pp=1, generation_tp=16), LENGTHS, ROOM) == [
        "training TP16 spans nodes of 8 GPUs: every layer then waits for the network",
        "generation TP16 spans nodes of 8 GPUs: every layer then waits for the network",
    ]
    (said,) = layout_warnings(job(pp=4, actor__ppo_mini_batch_size=1), LENGTHS, ROOM)
    assert said.startswith("pipeline stages wait 47% of an update: 4 micro-batches for 4 stages; raise actor.ppo_mini")
    (said,) = layout_warnings(job(gpus=128, generation_tp=1), LENGTHS, ROOM)
    assert said == "128 generation replicas share data.train_batch_size = 64 prompts: some have none"
    (said,) = layout_warnings(job(), LENGTHS, replace(ROOM, sequences=100))
    assert said == "the KV cache holds 100 sequences of 4096 tokens, fewer than rollout.max_num_seqs = 256"
    small = {"actor__ppo_max_token_len_per_gpu": 8191}
    (said,) = layout_warnings(job(**small), LENGTHS, ROOM)
    assert said.startswith("actor.ppo_max_token_len_per_gpu = 8191 is less than two of the longest sequences, 2 x 4096")
    assert layout_warnings(job(**small, actor__use_dynamic_bsz=False), LENGTHS, ROOM) == []

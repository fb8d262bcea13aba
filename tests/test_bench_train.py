"""tools/bench_train.py on CPU ranks: what it counts, and that packed and padded micro-batches have one loss."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import changed
from ranks import Ranks
from training_cases import ARCH, WITH_EXPERTS

from megarl.models.architecture import Architecture

SETTINGS = {
    "actor_rollout_ref": {"model": {"dtype": "float32"}, "actor": {"ppo_max_token_len_per_gpu": 96}},
}


def _measure(what: str, world: int, arch: Architecture = ARCH) -> dict[str, Any]:
    from dataclasses import asdict

    from megarl.config.load import build_config
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World
    from megarl.trainer.layouts import train_layout
    from tools import bench_train as bench

    bench.WARM_UP = 1
    config = build_config({**SETTINGS, "trainer": {"n_gpus_per_node": world}})
    groups = train_groups(World(), train_layout(config))
    try:
        if what == "log-probs":
            return asdict(bench.measure_log_probs(ARCH, groups, 40))
        actor = bench.build(config, arch, groups)
        if what == "training":
            return asdict(bench.measure_training(actor, config, [24] * 4 * world, 2, None, plain=True))
        lengths = bench.long_tailed(24, 48)
        return asdict(bench.measure_packing(actor, config, lengths, 1)) | {"lengths": lengths}
    finally:
        leave_groups(groups.world)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "arch"), [(1, ARCH), (2, ARCH), (1, WITH_EXPERTS)], ids=["1", "2", "experts"])
def test_training(ranks: Ranks, world: int, arch: Architecture) -> None:
    for figures in ranks.run(world, _measure, "training", world, arch):
        assert figures["tokens"] == 24 * 4 * world
        for phase in figures["phases"].values():
            assert phase["tokens_per_second"] == pytest.approx(figures["tokens"] / phase["seconds"] / world)
        ours, plain = (figures["phases"][n] for n in ("forward + backward", "plain Megatron-Core, unfused"))
        assert figures["extra"]["first_ratio_max_deviation"] == 0.0
        assert ours["mfu"] / plain["mfu"] == pytest.approx(figures["extra"]["of_plain_megatron"])


def test_model_flops_count_every_weight_once() -> None:
    from megarl.models.weights import logical_tensors
    from tools.bench_train import model_flops

    arch = changed(ARCH, num_layers=3)
    shapes = [t.shape for t in logical_tensors(arch).values()]
    parameters = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        parameters += size
    heads = arch.layer(0).attention
    attention = 12 * 3 * heads.num_attention_heads * heads.head_dim * (10**2 + 20**2) / 2
    assert model_flops(arch, [10, 20]) == pytest.approx(6 * parameters * 30 + attention)


@pytest.mark.parametrize("world", [1, 2])
def test_packing(ranks: Ranks, world: int) -> None:
    for figures in ranks.run(world, _measure, "packing", world):
        assert figures["tokens"] == sum(figures["lengths"]) and max(figures["lengths"]) == 48
        extra = figures["extra"]
        assert extra["loss_packed"] == pytest.approx(extra["loss_padded"], rel=1e-6)
        assert extra["times_padded"] > 0


def test_log_probs(ranks: Ranks) -> None:
    figures = ranks.run(1, _measure, "log-probs", 1)[0]
    assert figures["tokens"] == 40 and len(figures["phases"]) == 4

"""tools/bench_step.py on CPU ranks: what it counts, for the trainer's own steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from training_cases import ARCH

ROOT = Path(__file__).parents[1]

SETTINGS: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_prompt_length": 6, "max_response_length": 10},
    "actor_rollout_ref": {
        "model": {"dtype": "float32", "random_init": True},
        "actor": {"ppo_max_token_len_per_gpu": 64, "ppo_mini_batch_size": 2, "use_kl_loss": True},
        "rollout": {"n": 2},
    },
    "trainer": {"save_freq": 0, "test_freq": 0, "resume_mode": "disable", "logger": [], "log_rollouts": 0},
}


def _measure(world: int, tp: int) -> dict[str, Any]:
    from dataclasses import asdict

    import bench_step
    import bench_train

    from megarl.config.load import build_config
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World

    bench_train.WARM_UP = bench_step.WARM_UP = 1
    trainer = {**SETTINGS["trainer"], "n_gpus_per_node": world, "total_training_steps": 3}
    actor = {**SETTINGS["actor_rollout_ref"]["actor"], "megatron": {"tensor_model_parallel_size": tp}}
    policy = {**SETTINGS["actor_rollout_ref"], "actor": actor}
    config = build_config({**SETTINGS, "actor_rollout_ref": policy, "trainer": trainer})
    world = World()
    try:
        return asdict(
            bench_step.measure(bench_step.synthetic_inputs(config, ARCH), world, 2, alone=True, plain=True, peer=False)
        )
    finally:
        leave_groups(world)


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2)])
def test_a_step(ranks: Ranks, world: int, tp: int) -> None:
    for figures in ranks.run(world, _measure, world, tp):
        phases = figures["phases"]
        assert {"offload", "reshard", "generate", "reward", "log_probs", "ref", "update", "step"} <= set(phases)
        for name, tokens in (("generate", 80), ("log_probs", 128), ("ref", 128), ("update", 128), ("step", 128)):
            assert phases[name]["tokens_per_second"] == pytest.approx(tokens / phases[name]["seconds"] / world)
        assert phases["step"]["seconds"] > sum(phases[name]["seconds"] for name in ("generate", "log_probs")) / 2
        assert figures["predicted_gib"] == {} and phases["update"]["peak_gib"] == 0.0  # nothing to measure on a CPU
        assert set(figures["alone"]) == set(figures["of_alone"]) == {"update"}
        assert phases["update"]["mfu"] * phases["update"]["seconds"] == pytest.approx(
            3 * phases["log_probs"]["mfu"] * phases["log_probs"]["seconds"]
        )


def test_a_step_beside_trl_s_is_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    import bench_step_trl

    config = str(ROOT / "configs" / "bench_train.yaml")
    assert bench_step_trl.main([config, "trainer.n_gpus_per_node=2"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "bench_step_trl: error: TRL's step is compared on one rank: trainer.nnodes=1 trainer.n_gpus_per_node=1\n"
    )

"""Whole runs of several ranks over NCCL, from their start to the end of every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import FINGERPRINT, megarl, metrics_of, write_run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    ("megatron", "layers", "generation_tp"),
    [
        ({"pipeline_model_parallel_size": 2}, 5, 1),  # stages of 3 and 2 layers
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4, 2),  # NCCL within CUDA graphs
        ({}, 4, 1),
    ],
    ids=["pp2", "tp2", "dp2"],
)
def test_two_ranks_train_and_end(megatron: dict[str, Any], layers: int, generation_tp: int, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FINGERPRINT)
    config = write_run(
        tmp_path,
        actor_rollout_ref__model__dtype="bfloat16",
        actor_rollout_ref__actor__megatron=megatron,
        actor_rollout_ref__rollout__tensor_model_parallel_size=generation_tp,
        actor_rollout_ref__reshard__verify=True,
        reward__name=f"{tmp_path / 'reward.py'}:score",
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=3,
        trainer__save_freq=2,
    )
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"num_hidden_layers": layers, "hidden_size": 128}))
    done = megarl("train", str(config), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 3 and last["actor/first_ratio_max_deviation"] == 0.0
    assert last["rollout/logp_gap_mean"] < 0.05

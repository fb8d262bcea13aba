"""Whole runs of two ranks over NCCL, from their start to the end of every process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import FINGERPRINT, megarl, metrics_of, write_run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
ACTOR, ROLLOUT = "actor_rollout_ref__actor__megatron", "actor_rollout_ref__rollout"
CASES: dict[str, dict[str, Any]] = {
    "stages of 3 and 2 layers": {ACTOR: PP2},
    "NCCL within CUDA graphs": {ACTOR: TP2, f"{ROLLOUT}__tensor_model_parallel_size": 2},
    "vLLM": {ACTOR: PP2, ROLLOUT: {"name": "vllm", "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.1}},
    "a critic in a layout of its own": {
        ACTOR: PP2 | OFFLOAD,
        "critic__megatron": TP2 | {"pipeline_model_parallel_size": 1} | OFFLOAD,
        "critic__optim__lr": 1e-3,
        "algorithm__adv_estimator": "gae",
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__ref__megatron__param_offload": True,
    },
    "responses carried over": {
        f"{ROLLOUT}__carry_over": {"enable": True},
        "algorithm__rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    },
    "groups drawn until they differ": {"algorithm__filter_groups": {"enable": True, "metric": "score"}},
}


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_two_ranks_train_validate_save_and_end(sections: dict[str, Any], tmp_path: Path) -> None:
    if sections.get(ROLLOUT, {}).get("name") == "vllm" and find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    last = trained_by_two(tmp_path, "bfloat16", sections)
    assert last["step"] == 3 and last["actor/grad_norm"] > 0
    assert last["rollout/logp_gap_mean"] < 0.05


def trained_by_two(folder: Path, dtype: str, sections: dict[str, Any]) -> dict[str, Any]:
    """The last row of a run of three steps that ends with exit code 0; its heads are of a size vLLM has kernels for."""
    (folder / "reward.py").write_text(FINGERPRINT)
    config = write_run(
        folder,
        **sections,
        actor_rollout_ref__model__dtype=dtype,
        actor_rollout_ref__reshard__verify=True,
        reward__name=f"{folder / 'reward.py'}:score",
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=3,
        trainer__save_freq=2,
        trainer__test_freq=3,
    )
    sizes = {
        "model_type": "qwen2",
        "num_hidden_layers": 5,
        "hidden_size": 256,
        "intermediate_size": 128,
        "head_dim": 64,
    }
    model = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(model))
    done = megarl("train", str(config), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics_of(folder)[-1]

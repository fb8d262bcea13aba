"""What a checkpoint holds by `checkpoint.save_contents`, and what can be done with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import assert_same_weights, read_weights, write_with_further_layer
from ranks import Ranks
from run_cases import run_here
from tiny_run import FINGERPRINT, metrics_of, write_run

from megarl.config import ConfigError, load_config
from megarl.trainer.admission.checks import check_run

LINEAR = {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 0}


def _trained(ranks: Ranks, folder: Path, contents: list[str], **sections: Any) -> Path:
    """A run of two steps that has saved both; its folder of checkpoints."""
    folder.mkdir(exist_ok=True)
    config = write_run(
        folder,
        checkpoint__save_contents=contents,
        trainer__total_training_steps=2,
        trainer__save_freq=1,
        trainer__test_freq=0,
        trainer__val_before_train=False,
        actor_rollout_ref__actor__optim=LINEAR,
        **sections,
    )
    assert ranks.run(1, run_here, str(config))[0][0] == ""
    return folder / "run" / "checkpoints"


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.distcp"))


@pytest.mark.slow
def test_weights_alone_are_a_quarter_in_float32_and_begin_new_moments(ranks: Ranks, tmp_path: Path) -> None:
    whole = _trained(ranks, tmp_path / "whole", ["model", "optimizer"])
    weights = _trained(ranks, tmp_path / "weights", ["model"])
    assert _bytes(weights / "global_step_2") / _bytes(whole / "global_step_2") == pytest.approx(0.25, abs=0.05)
    rates = []
    for folder in (whole, weights):
        config = str(folder.parents[1] / "run.yaml")
        ((ended, said),) = ranks.run(1, run_here, config, ["trainer.total_training_steps=4"])
        assert ended == "" and ("holds no optimizer (checkpoint.save_contents)" in said) == (folder is weights)
        rates.append([row["actor/lr"] for row in metrics_of(folder.parents[1])])
    assert rates[0] == rates[1] and len(rates[0]) == 4  # the schedule goes on in both
    losses = [metrics_of(folder.parents[1])[2]["actor/grad_norm"] for folder in (whole, weights)]
    assert losses[0] == losses[1]  # of the same weights and rows; the moments are of no effect yet


@pytest.mark.slow
def test_a_hugging_face_folder_alone_is_for_other_programs(ranks: Ranks, tmp_path: Path) -> None:
    checkpoints = _trained(ranks, tmp_path, ["hf_model"])
    names = set(os.listdir(checkpoints / "global_step_2"))
    assert {"huggingface", "trainer.json", "manifest.json"} <= names
    assert not {name for name in names if name.endswith(".distcp")} | (names & {".metadata", "common.pt"})
    with pytest.raises(ValueError, match="it holds a Hugging Face folder alone") as refused:
        check_run(load_config(str(tmp_path / "run.yaml"), ["trainer.total_training_steps=4"]))
    assert "\n" not in str(refused.value)
    exported = checkpoints / "global_step_2" / "huggingface"
    again = [f"actor_rollout_ref.model.path={exported}", "actor_rollout_ref.model.random_init=false"]
    again += [f"trainer.default_local_dir={tmp_path / 'again'}", "actor_rollout_ref.model.tokenizer_path="]
    assert ranks.run(1, run_here, str(tmp_path / "run.yaml"), again)[0][0] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "contents"),
    [("glm4_moe", ["hf_model"]), ("deepseek_v3", ["model", "optimizer", "hf_model"])],
    ids=["glm4_moe", "deepseek_v3"],
)
def test_a_run_exports_layers_for_multi_token_prediction_unchanged(
    ranks: Ranks, tmp_path: Path, family: str, contents: list[str]
) -> None:
    """`transformers` reads the folder, and so does a run."""
    (tmp_path / "reward.py").write_text(FINGERPRINT)
    keys: dict[str, Any] = {
        "reward__name": f"{tmp_path / 'reward.py'}:score",
        "actor_rollout_ref__model__random_init": False,
        "checkpoint__save_contents": contents,
        "trainer__total_training_steps": 1,
        "trainer__save_freq": 1,
        "trainer__val_before_train": False,
        "trainer__test_freq": 0,
    }
    config = str(write_run(tmp_path, **keys))
    weights, further = write_with_further_layer(tmp_path, family, vocab_size=18)
    ended, said = ranks.run(1, run_here, config)[0]
    assert ended == "" and "a layer for multi-token prediction: not trained, exported unchanged" in said
    huggingface = tmp_path / "run" / "checkpoints" / "global_step_1" / "huggingface"
    tensors = read_weights(huggingface)
    assert_same_weights({name: tensors.pop(name) for name in further}, further)
    assert tensors.keys() == weights.keys()
    assert not torch.equal(tensors["lm_head.weight"], weights["lm_head.weight"])
    index = json.loads((huggingface / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights.keys() | further.keys()
    assert json.loads((huggingface / "config.json").read_text())["num_nextn_predict_layers"] == 1
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(huggingface)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    again = [f"actor_rollout_ref.model.path={huggingface}", "actor_rollout_ref.model.tokenizer_path="]
    check_run(load_config(config, [*again, f"trainer.default_local_dir={tmp_path / 'again'}"]))


@pytest.mark.parametrize("contents", ["[]", "[optimizer]", "[optimizer,hf_model]", "[weights]"])
def test_contents_that_are_of_no_use_are_refused(tmp_path: Path, contents: str) -> None:
    config = write_run(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load_config(str(config), [f"checkpoint.save_contents={contents}"])
    assert "save_contents" in str(refused.value)

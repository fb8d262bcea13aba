"""Holds the rules of OpenRLHF's settings, functions of (key, value, settings) that `openrlhf.yaml` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Made, Settings
from megarl.migration.openrlhf import (
    FLOWS,
    OPTIM,
    A,
    M,
    R,
    batches,
    budget,
    correction,
    kl,
    lengths,
    schedule,
    trainer_of,
)

__all__ = ["batches", "correction", "kl", "lengths"]

OFFLOAD = f"{A}.megatron.optimizer_offload"
FILES = "rows are files: data.train_files=[x.jsonl] or parquet, also globs and s3:// URIs"


def flow(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"trainer.flow": FLOWS[trainer_of(settings)]}


def judge(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"reward.name": "model", "reward_model.model.path": value} if value else {}


def bf16(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    return dtype(key, value, settings) if value else {}


def save_hf(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"checkpoint.save_contents": ["model", "optimizer", "hf_model"]} if value else {}


def deviation(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"algorithm.norm_adv_by_std_in_grpo": not value}


def ipo(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"algorithm.preference.loss_mode": "ipo"} if value else {}


def margin(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"data.margin_key": "margin"} if value else {}


def betas(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    section = "critic.optim" if key.startswith("critic.") else OPTIM
    return {f"{section}.adam_beta1": value[0], f"{section}.adam_beta2": value[1]}


def decay(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return schedule(settings, key.partition(".")[0])


def files(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = str(value).split(",")
    if value and all(name.endswith((".jsonl", ".parquet")) for name in names):
        return {"data.val_files" if key == "eval.dataset" else "data.train_files": names}
    return Made(kind="refused", why=FILES)


def logger(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    keys = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    name = next(name for name in keys if keys[name] == key)
    if not value:
        return {}
    if name not in settings.loggers:
        return Made(kind="refused", why=f"no logger {name} here: tensorboard, csv or path/to/file.py:class")
    others = [other for other in keys if other != name and settings.of(keys[other]) and other in settings.loggers]
    return {"trainer.logger": ["console", "jsonl", *sorted([name, *others])]}


def tensor_parallel(settings: Settings) -> Mapping[str, Any]:
    ranks = settings.number("ds.tensor_parallel_size") * settings.number("ds.ring_attn_size")
    section = f"{A}.megatron"
    return {f"{section}.tensor_model_parallel_size": ranks, f"{section}.sequence_parallel": ranks > 1}


def tokens(settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.ppo_max_token_len_per_gpu": budget(settings)}


def resumed(settings: Settings) -> Mapping[str, Any]:
    return {"trainer.resume_mode": "auto"}


def not_negative(value: int) -> int:
    return max(0, value)


def zero_is_never(value: int) -> int:
    return 0 if value == -1 else value


def frozen(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value == settings.of("actor.model_name_or_path"):
        return Made(kind="translated", why="the reference is the policy as it begins")
    return Made(kind="refused", why="the reference is the policy as it begins: set actor_rollout_ref.model.path to it")


def dtype(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value in ("bf16", "bfloat16", True):
        return {f"{M}.dtype": "bfloat16"}
    return Made(kind="refused", why="weights are bfloat16 or float32: float16 needs loss scaling, which is not here")


def epochs(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    if trainer_of(settings) != "ppo":
        return {"trainer.total_epochs": value}
    critic = {"critic.ppo_epochs": value} if settings.of("algo.advantage.estimator") == "gae" else {}
    return {f"{A}.ppo_epochs": value} | critic


def engines(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{R}.name": "native" if value == 0 else "vllm"}


def asleep(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.megatron.param_offload": True, OFFLOAD: True} if value else {}


def generated(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value and settings.of("algo.dynamic_filtering_enable"):
        return {"data.gen_batch_size": value}
    return Made(kind="translated", why="the engine takes all prompts of a step, as many at a time as fit")


def estimator(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {
        "gae": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "group_norm": "grpo",
        "dr_grpo": "dr_grpo",
    }
    if value not in names:
        return Made(kind="refused", why="megarl algorithms lists the estimators")
    return {"algorithm.adv_estimator": names[value]}


def prompts(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    if trainer_of(settings) == "sft" and not settings.of("data.output_key"):
        return {"data.messages_key": value}
    return {"data.prompt_key": value} if value else {}


def labels(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"data.label_key" if trainer_of(settings) == "kto" else "data.answer_key": value} if value else {}


def clip(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.clip_ratio_low": value[0], f"{A}.clip_ratio_high": value[1]} if value else {}


def overlong(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    section = "reward.overlong_buffer"
    return {f"{section}.enable": True, f"{section}.len": value} if value else {}


def group_range(key: str, value: Any, settings: Settings) -> Made:
    if value is None or list(value) == [0, 1] or not settings.of("algo.dynamic_filtering_enable"):
        return Made(kind="translated", why="groups whose responses all scored the same are left out")
    return Made(kind="refused", why="only groups whose responses all scored the same are left out: data.filter")

"""Holds the rules of TRL's settings, functions of (key, value, all settings) that `trl.yaml` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Made, Settings
from megarl.migration.trl import correction
from megarl.migration.trl_batch import batch_sizes, updates_per_batch
from megarl.migration.trl_trainers import OPTIM, POLICY_LOSSES, TRAINERS, A, M, R, trainer_of

FILES = "rows are files: data.train_files=[x.jsonl] or parquet, also globs and s3:// URIs"
_STEPS = {
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
}


def batch(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return batch_sizes(settings)


def steps(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    """Translate a number of optimizer steps; a step of MegaRL is a generated batch."""
    if not isinstance(value, int) or value <= 0:
        return {}
    return {_STEPS[key]: max(1, value // (updates_per_batch(settings) * settings.number("num_iterations")))}


def bf16(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{M}.dtype": "bfloat16"} if value else {}


def corrected(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    on = settings.of("vllm_importance_sampling_correction")
    return correction(settings) if value is not None and (on is None or on) else {}


def bias_correction(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.kl_loss_type": "k3+" if value else "k3"}


def epochs(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.ppo_epochs": value, "critic.ppo_epochs": value}


def kl(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"algorithm.use_kl_in_reward": bool(value)} | ({"algorithm.kl_ctrl.kl_coef": value} if value else {})


def judge(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"reward_model.model.path": value, "reward.name": "model"}


def whole(value: float) -> int:
    return max(1, round(value))


def resumed(value: Any) -> str:
    return "auto" if value else "disable"


def whole_vocabulary(value: int) -> int:
    return value or -1


def list_of_one(value: Any) -> list[Any]:
    return [value]


def side(value: Any) -> str:
    return "left" if value == "keep_end" else "right"


def trainer(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    name = trainer_of(settings)
    flow = {"trainer.flow": TRAINERS[name].flow}
    if name == "cpo" and settings.of("loss_type") != "simpo":
        why = "CPO's loss of pairs without a reference: algorithm.preference.loss_mode=simpo or orpo are such losses"
        return Made(kind="refused", values=flow, why=why)
    return flow


def model(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if settings.of("sft_model_path"):
        return Made(kind="translated", why="its tokenizer; the policy is sft_model_path")
    return {} if value is None else {f"{M}.path": value}


def report(key: str, value: Any, settings: Settings) -> Made:
    names = [value] if isinstance(value, str) else list(value or [])
    known = [name for name in names if name in settings.loggers]
    unknown = [name for name in names if name not in (*settings.loggers, "none", "all")]
    values = {"trainer.logger": ["console", "jsonl", *known]}
    if unknown:
        return Made(
            kind="refused", values=values, why=f"no logger {', '.join(unknown)} here: tensorboard, csv or a class"
        )
    return Made(kind="translated", values=values, why="loggers")


def dataset(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if str(value).endswith((".jsonl", ".parquet")):
        return {"data.train_files": [value]}
    return Made(kind="refused", why=FILES)


def schedule(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    style = names.get(value, value)
    if style not in ("constant", "linear", "cosine"):
        return Made(kind="refused", why="lr_decay_style is constant, linear or cosine; min_lr is where it ends")
    return {f"{OPTIM}.lr_decay_style": style, **_lowest(settings)}


def _lowest(settings: Settings) -> dict[str, Any]:
    """Set the learning rate at which the decay ends; TRL gives it, or its share of the first."""
    arguments = settings.of("lr_scheduler_kwargs")
    if settings.of("lr_scheduler_type") != "cosine_with_min_lr" or not isinstance(arguments, Mapping):
        return {}
    lr = settings.of("learning_rate") or TRAINERS[trainer_of(settings)].lr
    lowest = arguments.get("min_lr", lr * arguments["min_lr_rate"] if "min_lr_rate" in arguments else None)
    return {} if lowest is None else {f"{OPTIM}.min_lr": lowest}


def schedule_arguments(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    result = _lowest(settings)
    return result if result or not value else Made(kind="refused", why="lr_decay_style and min_lr")


def warm_up(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    if isinstance(value, float) and 0 < value < 1:  # transformers 5 has no warmup_ratio
        return {f"{OPTIM}.lr_warmup_steps_ratio": value}
    return {f"{OPTIM}.lr_warmup_steps": value} if value else {}


def dtype(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value not in ("bfloat16", "float32", None, "auto"):
        return Made(kind="refused", why="weights are bfloat16 or float32")
    return {f"{M}.dtype": value} if value in ("bfloat16", "float32") else {}


def processes(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    nodes = settings.number("num_machines")
    if not isinstance(value, int) or value % nodes:
        return Made(kind="refused", why=f"{value} processes do not divide over {nodes} machines")
    return {"trainer.n_gpus_per_node": value // nodes}


def beta(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    name = trainer_of(settings)
    if TRAINERS[name].flow in ("preference", "kto"):
        return {"algorithm.preference.beta": value} if value else {}
    if name == "rloo":
        return {"algorithm.use_kl_in_reward": bool(value)} | ({"algorithm.kl_ctrl.kl_coef": value} if value else {})
    return {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": value} if value else {}


def loss(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    name = trainer_of(settings)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if TRAINERS[name].flow == "preference":
        losses = {"sigmoid": "dpo", "ipo": "ipo", "dpo": "dpo", "simpo": "simpo", "orpo": "orpo"}
        if not isinstance(value, str) or value not in losses or (name == "cpo" and value != "simpo"):
            return Made(kind="refused", why="megarl algorithms lists the losses on pairs: dpo, ipo, simpo, orpo")
        return {"algorithm.preference.loss_mode": losses[value]}
    if name == "kto" and value == "kto":
        return {}
    if value not in POLICY_LOSSES or value in ("luspo", "vespo"):
        return Made(
            kind="refused", why="megarl algorithms lists the losses; actor.loss_agg_mode says how tokens add up"
        )
    means = {"dr_grpo": "seq-mean-token-sum-norm", "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
    result: dict[str, Any] = {f"{A}.loss_agg_mode": means.get(value, "token-mean")}
    if value in ("cispo", "sapo"):
        result[f"{A}.policy_loss.loss_mode"] = value
    if value == "cispo":
        result[f"{A}.clip_ratio_low"] = 0.9999  # only its largest weight is bounded
    return result


def clip_high(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if settings.of("loss_type") == "cispo":  # there it is the largest weight
        if not isinstance(value, int | float) or value <= 1:
            return Made(kind="refused", why="with loss_type=cispo it is the largest weight, 5.0 say")
        return {f"{A}.clip_ratio_high": value - 1}
    return {} if value is None else {f"{A}.clip_ratio_high": value}


def scale(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value not in (True, False, "group", "none"):
        return Made(kind="refused", why="advantages are divided by the group's deviation or by nothing")
    return {"algorithm.norm_adv_by_std_in_grpo": value in (True, "group")}


def length(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    """Split the length that TRL gives to a prompt and its answer together."""
    if not isinstance(value, int) or value < 2:
        return Made(kind="refused", why="data.max_prompt_length and data.max_response_length: tokens of both")
    prompt, answer = settings.number("max_prompt_length", 0), settings.number("max_completion_length", 0)
    answer = answer or max(1, value - prompt if prompt else value // 2)
    return {"data.max_prompt_length": prompt or max(1, value - answer), "data.max_response_length": answer}


def level(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.policy_loss.loss_mode": "gspo"} if str(value).startswith("sequence") else {}


def rewards(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = value if isinstance(value, list) else [value]
    if names == ["accuracy_reward"]:
        return {"reward.name": "math_verify"}
    return Made(kind="refused", why="reward.name=path/to/file.py:function, or reward.parts with a weight each")


def engine(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{R}.name": "vllm" if value else "native"}

"""Holds the rules of verl's settings, functions of (key, value, all settings) that `verl.yaml` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.algorithms.registry import ESTIMATORS, LOSSES
from megarl.migration.entry import Made, Settings
from megarl.migration.verl import (
    A,
    C,
    F,
    J,
    M,
    R,
    budget,
    is_dynamic,
    is_sft,
    needs_critic,
    ranks_of_a_sequence,
    updates,
)

__all__ = ["ESTIMATORS", "LOSSES"]

KL = {"kl": "k1", "low_var_kl": "k3", "mse": "k2", "low_var_kl+": "k3+", "kl+": "k1+"}
"""verl's older names of KL estimators."""
LOGGERS = {"file": "jsonl"}
IMAGES = "images, video and audio are not read: models are language models; use rows of text"
VALIDATION = f"{R}.val_kwargs"


def _model_of(key: str) -> str:
    """Find the role in whose section a key is."""
    return next(role for role in (A, F, C, J) if key.startswith(f"{role}."))


def _ranks_of_a_replica(settings: Settings) -> dict[str, Any]:
    """Set the ranks of an engine's replica: enough for its matrices and for its experts."""
    tp = settings.number(f"{R}.tensor_model_parallel_size")
    spread = settings.number(f"{R}.expert_parallel_size")
    return {f"{R}.tensor_model_parallel_size": max(tp, spread)}


def files(key: str, value: Any, settings: Settings) -> Made:
    if isinstance(value, str):
        return Made(kind="carried", values={key: [value]}, why="a list of files")
    return Made(kind="carried", values={} if value is None else {key: value})


def place(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    """Append the keys within a column to the column's: `data.prompt_dict_keys` to `data.prompt_key`."""
    to = "data.prompt_key" if key == "data.prompt_dict_keys" else "data.answer_key"
    names = value if isinstance(value, list) else [value]
    return {to: ".".join([str(settings.of(to)), *map(str, names)])} if settings.of(to) and names else {}


def argument(key: str, value: Any, settings: Settings) -> Made:
    name = key.removeprefix("custom_reward_function.reward_kwargs.")
    return Made(kind="translated", values={f"reward.args.{name}": value}, why="reward.args")


def frequency(key: str, value: Any, settings: Settings) -> Made:
    if value is None:
        return Made(kind="translated", why="asks for nothing")
    if isinstance(value, str):
        return Made(kind="refused", why="steps are counted; -1 is one at the end of the run")
    return Made(kind="carried", values={key: value}, why="at the end of the run only" if value == -1 else "")


def gpg_loss(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.policy_loss.loss_mode": "reinforce"} if value else {}


def tokens(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    model = _model_of(key)
    return {f"{model}.ppo_max_token_len_per_gpu": budget(settings, model)}


def judged_tokens(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    rows, tokens = value if isinstance(value, int) and value > 0 else 1, f"{J}.forward_max_token_len_per_gpu"
    if is_dynamic(settings, J) and tokens in settings:
        return {f"{J}.ppo_max_token_len_per_gpu": settings[tokens]}
    return {f"{J}.ppo_max_token_len_per_gpu": max(rows * budget(settings, J), budget(settings, J))}


def warm_up(key: str, value: Any, settings: Settings) -> Made:
    if value is None or value == -1:
        return Made(kind="translated", why="asks for nothing")
    count = updates(settings, _model_of(key))
    why = f"verl's schedule goes on once per training step, here with each of its {count} optimizer steps"
    if count == 1:
        return Made(kind="carried", values={key: value * count})
    return Made(kind="translated", values={key: value * count}, why=why)


def betas(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    section = key.removesuffix(".betas")
    return {f"{section}.adam_beta1": value[0], f"{section}.adam_beta2": value[1]} if value else {}


def context_parallel(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    model = _model_of(key)
    return {f"{model}.megatron.context_parallel_size": ranks_of_a_sequence(settings, model)}


def experts(key: str, value: Any, settings: Settings) -> Made:
    section = key.rpartition(".")[0]
    shared = settings.number(key) > 1 and settings.number(f"{section}.tensor_model_parallel_size") > 1
    return Made(kind="carried", values={key: value, **({f"{section}.sequence_parallel": True} if shared else {})})


def profile(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"profiler.tool": "torch"} if value else {}


def profiled_ranks(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    """Join the ranks of all roles that are profiled, by `profiler.enable` or the older trainer.profile_steps."""
    older = settings.of("trainer.profile_steps")
    enabled = {role: settings.of(f"{role}.profiler.enable") for role in (A, F, C, J)}
    roles = [role for role, enable in enabled.items() if (older if enable is None else enable)]
    if any(settings.of(f"{role}.profiler.all_ranks") for role in roles):
        return {"profiler.ranks": "all"}
    ranks = {rank for role in roles for rank in settings.of(f"{role}.profiler.ranks") or ()}
    return {"profiler.ranks": sorted(ranks)} if ranks else {}


def top_k(key: str, value: Any, settings: Settings) -> Made:
    return Made(kind="carried", values={key: value or -1})


def checkpointing(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{M}.enable_gradient_checkpointing": True} if value else {}


def judge(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"reward.name": "model"} if value else {}


def folder(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {key: value or ""} if settings.of("trainer.resume_mode") == "resume_path" else {}


def megabytes(value: float) -> int:
    return int(value * 2**20)


def tokens_of_characters(value: int) -> int:
    return max(1, value // 4)


def minutes(value: float) -> float:
    return round(value / 60, 2)


def module(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if is_sft(settings):
        return {"trainer.flow": "sft"}
    return Made(kind="refused", why="it trains nothing: megarl generate answers prompts, megarl eval scores a model")


def halves(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"data.max_prompt_length": value - value // 2, "data.max_response_length": value // 2}


def messages(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    enabled = settings.of("data.multiturn.enable")
    return {"data.messages_key": value} if value and (enabled or enabled is None) else {}


def no_images(key: str, value: Any, settings: Settings) -> Made:
    listed = (settings.of("data.image_key"), settings.of("data.video_key")) == ("images", "videos")
    if value is None or listed:
        return Made(kind="translated", why="verl's own names of columns" if listed else "asks for nothing")
    return Made(kind="refused", why=IMAGES)


def kl_loss(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value in ("kl", "k1"):
        why = "the gradient of k1 as a loss is zero on-policy: k1+ has its value and the gradient of k2"
        return Made(kind="translated", values={f"{A}.kl_loss_type": "k1+"}, why=why)
    if value == "full":
        return Made(kind="refused", why="the KL over the whole vocabulary is not computed; use k3")
    new = KL.get(str(value), value)
    return Made(kind="carried" if new == value else "translated", values={f"{A}.kl_loss_type": new}, why="k-names")


def logger(key: str, value: Any, settings: Settings) -> Made:
    names_there = [value] if isinstance(value, str) else list(value or [])
    names = [LOGGERS.get(name, name) for name in names_there]
    known = [name for name in names if name in settings.loggers]
    unknown = [name for name in names if name not in settings.loggers]
    values = {"trainer.logger": [*known, *(["jsonl"] if "jsonl" not in known else [])]}
    if unknown:
        others = "tensorboard, csv or path/to/file.py:class; the others go on"
        why = f"no logger {', '.join(map(str, unknown))} here: {others}"
        return Made(kind="refused" if not known else "translated", values=values, why=why)
    return Made(kind="carried", values=values, why="with jsonl, which megarl's own commands read")


def draws(key: str, value: Any, settings: Settings) -> Made:
    if not settings.of("algorithm.filter_groups.enable"):
        return Made(kind="translated", why="the size of a draw with algorithm.filter_groups, which is off")
    return Made(kind="carried", values={} if value is None else {"data.gen_batch_size": value})


def target_kl(key: str, value: Any, settings: Settings) -> Made:
    if value is None or settings.of("algorithm.kl_ctrl.type") != "adaptive":
        return Made(kind="translated", why="a fixed coefficient has no target")
    why = (
        "verl's target is KL per token, here it is per response: set algorithm.kl_ctrl.target_kl to that many times as "
    )
    return Made(kind="refused", why=why + "much as a response has tokens")


def of_critic(key: str, value: Any, settings: Settings) -> Made:
    if value and not needs_critic(settings):
        return Made(kind="translated", why="the estimator has no critic")
    return Made(kind="carried", values={} if value is None else {key: value})


def function(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    name = settings.of("custom_reward_function.name") or "compute_score"
    return {"reward.name": f"{value}:{name}"} if value else {}


def manager(key: str, value: Any, settings: Settings) -> Made:
    if value == "batch":
        why = "the function takes lists of data_sources, solution_strs, ground_truths and extra_infos"
        return Made(kind="translated", values={"reward.batch_size": 64}, why=why)
    if value in ("naive", "prime", "dapo", None):
        why = "functions score responses as they finish, in processes of their own; dapo's penalty is overlong_buffer"
        return Made(kind="translated", why=why)
    return Made(kind="refused", why="a manager of your own is a function here: reward.name=path/to/file.py:function")


def arguments(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if isinstance(value, Mapping) or value is None:
        return {"reward.args": dict(value or {})}
    return Made(kind="refused", why="it must be a mapping of keyword arguments")


def save_contents(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    known = [part for part in value or [] if part in ("model", "optimizer", "hf_model")]
    return {"checkpoint.save_contents": known} if known != ["model", "optimizer"] else {}


def turns(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    section = key.rpartition(".")[0]
    more = {"max_turns": 0, "max_assistant_turns": 0, "max_user_turns": 1}
    bounds = [count + n for name, n in more.items() if (count := settings.of(f"{section}.{name}"))]
    return {"environment.max_turns": min(bounds)} if bounds else {}


def over_sample(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    if not value:
        return {}
    prompts, weights = settings.number("data.train_batch_size"), "algorithm.rollout_correction.rollout_is"
    return {
        f"{R}.carry_over.enable": True,
        f"{R}.carry_over.groups": min(2 * prompts, prompts + max(1, round(prompts * float(value)))),
        weights: settings.of(weights) or "token",
    }


def rejection(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    if value in (None, "token", "sequence", "geometric"):
        return Made(kind="carried", values={"algorithm.rollout_correction.rollout_rs": value})
    if value in names:
        return {"algorithm.rollout_correction.rollout_rs": names[value]}
    return Made(kind="refused", why="responses are rejected by token, sequence or geometric ratios here")


def prefetch(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    section = f"{_model_of(key)}.megatron"
    return {f"{section}.overlap_grad_reduce": True, f"{section}.overlap_param_gather": True} if value else {}


def dtype(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "bfloat16", "float32": "bfloat16", None: None}
    if value not in names:
        return Made(
            kind="refused", why="weights are bfloat16 or float32: float16 needs loss scaling, which is not here"
        )
    return {f"{M}.dtype": names[value]} if value else {}


def engine(key: str, value: Any, settings: Settings) -> Made:
    if value in ("vllm", None):
        return Made(kind="carried", values={f"{R}.name": "vllm"})
    if value in ("sglang", "trtllm", "hf", "sglang_async", "vllm_async"):
        why = f"{value} is not an engine here; vllm and native are"
        return Made(kind="translated", values={f"{R}.name": "vllm"}, why=why)
    return Made(kind="refused", why="an engine of your own is rollout.name=path/to/file.py:class")


def replica(key: str, value: Any, settings: Settings) -> Made:
    result = _ranks_of_a_replica(settings)
    same = value in result.values()
    return Made(kind="carried" if same else "translated", values=result, why="" if same else "with the experts' ranks")


def replica_experts(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    if not isinstance(value, int) or value <= 1:
        return {}
    return _ranks_of_a_replica(settings) | {f"{R}.enable_expert_parallel": True}


def greedy(key: str, value: Any, settings: Settings) -> Mapping[str, Any]:
    """Set the temperature of validation to 0 without do_sample, as verl does."""
    return {} if value else {f"{VALIDATION}.temperature": 0.0}


def temperature(key: str, value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if settings.of(f"{VALIDATION}.do_sample"):
        return Made(kind="carried", values={f"{VALIDATION}.temperature": value})
    if value:
        why = "verl ignores it without val_kwargs.do_sample, and so does this"
        return Made(kind="translated", values={f"{VALIDATION}.temperature": 0.0}, why=why)
    return {f"{VALIDATION}.temperature": 0.0}


def samples(key: str, value: Any, settings: Settings) -> Made:
    if value and value > 1 and not settings.of(f"{VALIDATION}.do_sample"):
        why = "greedy responses to a prompt are all the same (val_kwargs.do_sample is not set): one is drawn"
        return Made(kind="translated", values={f"{VALIDATION}.n": 1}, why=why)
    return Made(kind="carried", values={f"{VALIDATION}.n": value} if value else {})

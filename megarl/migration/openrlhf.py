"""Names OpenRLHF's trainers and defaults, and the MegaRL keys that stand for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from megarl.migration.entry import Computed, Settings
from megarl.migration.openrlhf_names import TRAINER

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIM, CORRECTION = f"{A}.optim", "algorithm.rollout_correction"

FLOWS: Mapping[str, str] = {"ppo": "ppo", "sft": "sft", "dpo": "preference", "kto": "kto", "rm": "reward_model"}
LEARNING_RATES: Mapping[str, float] = {"ppo": 1e-6, "sft": 5e-6, "dpo": 1e-5, "kto": 1e-5, "rm": 9e-6}

DEFAULTS: Mapping[str, Any] = {
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "data.max_len": 2048,
    "data.multiturn": False,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 16_192,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.min_lr_ratio": 0.1,
    "critic.min_lr_ratio": 0.1,
    "critic.adam.lr": 9e-6,
}
"""Defaults of the options that the rules of other options read."""


USUAL: Mapping[str, Sequence[Any]] = {
    "ckpt.max_mem": (inf, 100_000_000),
    "data.max_samples": (100_000_000, 1_000_000),
}
"""Values that bound nothing."""


def trainer_of(settings: Settings) -> str:
    """Name the trainer: the setting says it, else the options tell it.

    Raises:
        ValueError: MegaRL has no counterpart of the trainer.
    """
    name = settings.of(TRAINER)
    if name is None:
        name = "ppo" if settings.under("rollout") or settings.under("algo") else "sft"
    if not isinstance(name, str) or name not in FLOWS:
        raise ValueError(f"OpenRLHF's train_{name} has no counterpart here; those that have: {', '.join(FLOWS)}")
    return name


def lengths(settings: Settings) -> dict[str, int]:
    """Count the tokens of a prompt and of an answer; OpenRLHF may give only their sum."""
    whole = settings.number("data.max_len")
    answer = settings.number("rollout.max_new_tokens", 0) or whole // 2
    prompt = settings.number("data.prompt_max_len", 0) or max(1, whole - answer)
    return {"data.max_prompt_length": prompt, "data.max_response_length": answer}


def batches(settings: Settings) -> dict[str, int]:
    """Translate batch sizes: PPO's are prompts per step and responses per update; the other trainers' are rows."""
    update = settings.number("train.batch_size")
    if trainer_of(settings) != "ppo":
        return {"data.train_batch_size": update}
    prompts, n = settings.number("rollout.batch_size"), settings.number("rollout.n_samples_per_prompt")
    return {
        "data.train_batch_size": prompts,
        f"{A}.ppo_mini_batch_size": min(prompts, max(1, update // n)),
        f"{R}.n": n,
    }


def budget(settings: Settings) -> int:
    """Count the tokens that OpenRLHF's options allow a micro-batch: at least one whole sequence, or pair."""
    longest = sum(lengths(settings).values()) * (2 if trainer_of(settings) in ("dpo", "rm") else 1)
    if settings.of("train.dynamic_batch_enable"):
        return max(longest, settings.number("train.max_tokens_per_gpu"))
    return longest * settings.number("train.micro_batch_size")


def kl(settings: Settings) -> dict[str, Any]:
    """Set the KL to the reference, as a part of the loss or of the reward."""
    coef, estimator = settings.of("algo.kl.init_coef"), settings.of("algo.kl.estimator")
    estimator = "k3" if settings.of("algo.kl.estimator_k3") else estimator
    coef = 0.01 if isinstance(coef, Computed) else coef
    if settings.of("algo.kl.use_loss"):
        kind = {"k1": "k1+", "k2": "k2", "k3": "k3"}.get(str(estimator), "k3")
        return {f"{A}.use_kl_loss": bool(coef)} | (
            {f"{A}.kl_loss_coef": coef, f"{A}.kl_loss_type": kind} if coef else {}
        )
    in_reward = {"algorithm.kl_ctrl.kl_coef": coef, "algorithm.kl_penalty": estimator} if coef else {}
    return {"algorithm.use_kl_in_reward": bool(coef), **in_reward}


def correction(settings: Settings) -> dict[str, Any]:
    """Set the importance weights for the engine's distribution: clipped, or 0 out of bounds."""
    level = {"token": "token", "seq": "sequence"}.get(str(settings.of("algo.advantage.is_correction_level")))
    mode, kind = settings.of("algo.advantage.is_correction_mode") or "mask", settings.of("vllm_is_correction_type")
    if settings.of("enable_vllm_is_correction"):
        level = "sequence" if kind == "seq-mask-tis" else "token"
        mode = "mask" if settings.of("use_icepop") or kind in ("icepop", "seq-mask-tis") else "clip"
    if level is None:
        return {}
    bounds = settings.of("algo.advantage.is_correction_threshold") or settings.of("vllm_is_truncated_threshold")
    bounds = bounds if isinstance(bounds, list) else [bounds] if bounds else [0.5, 5.0]
    result = {f"{CORRECTION}.rollout_is": level, f"{CORRECTION}.rollout_is_threshold": bounds[-1]}
    if mode == "mask":
        result |= {
            f"{CORRECTION}.rollout_rs": level,
            f"{CORRECTION}.rollout_rs_threshold": bounds[-1],
            f"{CORRECTION}.rollout_rs_threshold_lower": bounds[0] if len(bounds) > 1 else 1e-9,
        }
    return result


def schedule(settings: Settings, model: str) -> dict[str, Any]:
    """Set the decay of a model's learning rate, which ends at a share of it."""
    section, usual = ("critic", 9e-6) if model == "critic" else ("actor", LEARNING_RATES[trainer_of(settings)])
    lr, share = settings.of(f"{section}.adam.lr") or usual, settings.of(f"{section}.min_lr_ratio")
    kind = settings.of(f"{section}.lr_scheduler") or settings.of("actor.lr_scheduler")
    optim = "critic.optim" if model == "critic" else OPTIM
    names = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
    result = {f"{optim}.lr_decay_style": names.get(str(kind), kind)}
    ends = str(kind).endswith("_with_min_lr") and isinstance(lr, float) and isinstance(share, int | float)
    return result | ({f"{optim}.min_lr": lr * share} if ends else {})


def complete(settings: Settings, result: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """List keys to set beside the user's, each with its value and the reason."""
    name, default = trainer_of(settings), "OpenRLHF's default"
    usual: dict[str, Any] = {
        **batches(settings),
        **lengths(settings),
        f"{A}.ppo_max_token_len_per_gpu": budget(settings),
        f"{OPTIM}.lr": LEARNING_RATES[name],
        f"{OPTIM}.adam_beta2": 0.95,
        f"{OPTIM}.weight_decay": 0.0,
        f"{OPTIM}.lr_warmup_steps_ratio": 0.03,
        **schedule(settings, "actor"),
        "trainer.n_gpus_per_node": 8,
        "trainer.total_epochs": 1,
        "trainer.test_freq": 0,
    }
    if name == "sft" and "data.answer_key" not in result:
        usual["data.messages_key"] = settings.of("data.input_key") or "input"
    if name != "ppo":
        return {"trainer.flow": (FLOWS[name], f"these options are those of train_{name}")} | {
            key: (value, default) for key, value in usual.items()
        }
    usual |= {"algorithm.adv_estimator": "gae", "data.prompt_key": "input", f"{A}.loss_agg_mode": "token-mean"}
    usual |= {f"{R}.name": "vllm", **kl(settings)}
    if settings.of("algo.advantage.estimator") == "gae":
        usual |= {
            "algorithm.lam": 1.0,
            "critic.cliprange_value": 0.5,
            "critic.optim.lr": 9e-6,
            "critic.optim.adam_beta2": 0.95,
            "critic.optim.weight_decay": 0.0,
            "critic.optim.lr_warmup_steps_ratio": 0.03,
            "critic.ppo_max_token_len_per_gpu": budget(settings),
            **schedule(settings, "critic"),
        }
    if settings.of("rollout.top_p") not in (None, 1, 1.0):
        usual[f"{CORRECTION}.rollout_is"] = "token"
    return {key: (value, default) for key, value in usual.items()}

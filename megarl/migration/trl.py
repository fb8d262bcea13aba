"""Lists keys for the defaults of TRL's trainers, and keys that several TRL settings set together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Settings
from megarl.migration.trl_batch import batch_sizes
from megarl.migration.trl_trainers import OPTIM, TRAINERS, A, trainer_of

CORRECTION = "algorithm.rollout_correction"


def complete(settings: Settings, result: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """List the flow and the trainer's defaults, each with the reason."""
    name, default = trainer_of(settings), "TRL's default"
    trainer = TRAINERS[name]
    size_of_a_step = "a step of per_device_train_batch_size x gradient_accumulation_steps x num_processes"
    added: dict[str, tuple[Any, str]] = {
        "trainer.flow": (trainer.flow, f"these fields are {name.upper()}'s"),
        **{key: (size, size_of_a_step) for key, size in batch_sizes(settings).items()},
        f"{OPTIM}.lr": (trainer.lr, default),
        f"{OPTIM}.lr_decay_style": ("linear", default),
        f"{OPTIM}.weight_decay": (0.0, default),
        "trainer.total_epochs": (3, default),
        **{key: (value, default) for key, value in trainer.defaults.items()},
    }
    if name == "ppo":
        added["critic.optim.lr"] = (result.get(f"{OPTIM}.lr", trainer.lr), "TRL has one optimizer for both")
    if name == "grpo" and result.get(f"{A}.use_kl_loss"):
        added[f"{A}.kl_loss_type"] = ("k3+", f"{default}: use_bias_correction_kl")
    if name == "grpo" and settings.of("vllm_importance_sampling_correction") is None:
        added |= {key: (value, default) for key, value in correction(settings).items()}
    return added


def correction(settings: Settings) -> dict[str, Any]:
    """Set the importance weights for vLLM's distribution: truncated, or 0 out of bounds, by token or sequence."""
    if not settings.of("use_vllm"):
        return {}
    mode = str(settings.of("vllm_importance_sampling_mode") or "sequence_mask")
    level = mode.partition("_")[0]
    cap = settings.of("vllm_importance_sampling_cap")
    upper = settings.of("vllm_importance_sampling_clip_max") or cap or 3.0
    lower = settings.of("vllm_importance_sampling_clip_min")
    result = {f"{CORRECTION}.rollout_is": level, f"{CORRECTION}.rollout_is_threshold": upper}
    if mode.endswith("_mask"):
        result |= {
            f"{CORRECTION}.rollout_rs": level,
            f"{CORRECTION}.rollout_rs_threshold": upper,
            f"{CORRECTION}.rollout_rs_threshold_lower": lower or 1e-9,  # null would be 1 / upper
        }
    return result

"""Lists the MegaRL keys that stand for the defaults of verl's trainers of demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Settings
from megarl.migration.verl import MODULE, A, budget

OPTIM = f"{A}.optim"


def complete(settings: Settings, result: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """List keys to set beside the user's, each with its value and the reason."""
    default, module = "verl's default", str(settings.of(MODULE))
    newer = module.startswith("sft_trainer") or any(key.startswith("engine.") for key in settings.written)
    conversations = settings.of("data.multiturn.enable") or newer or "data.messages_key" in result
    rows = {"data.messages_key": "messages"} if conversations else {"data.prompt_key": "question"}
    lr, beta2, decay, warm = (1e-3, 0.999, "constant", 0.0) if newer else (1e-5, 0.95, "cosine", 0.1)
    usual = {
        **rows,
        "data.train_batch_size": 256,
        f"{OPTIM}.lr": lr,
        f"{OPTIM}.adam_beta2": beta2,
        f"{OPTIM}.lr_decay_style": decay,
        f"{OPTIM}.lr_warmup_steps_ratio": warm,
        "trainer.total_epochs": 4,
        "trainer.n_gpus_per_node": 1 if newer else 8,
    }
    return {
        "trainer.flow": ("sft", "these keys are those of verl's trainer of demonstrations"),
        **{key: (value, default) for key, value in usual.items()},
        f"{A}.ppo_max_token_len_per_gpu": (budget(settings, A), "tokens of the micro-batches that verl's keys allow"),
    }

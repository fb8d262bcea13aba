"""verl's trainers of demonstrations: their keys that its PPO trainer has not, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Entry, Made, Settings, met, met_by, refused, renamed, ruled
from megarl.migration.verl import MODULE, A, budget, is_sft

M, OPTIM = "actor_rollout_ref.model", f"{A}.optim"


def complete(settings: Settings, made: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Keys to set beside those that are written, with the reason."""
    default, module = "verl's default", str(settings.of(MODULE))
    newer = module.startswith("sft_trainer") or any(key.startswith("engine.") for key in settings.written)
    conversations = settings.of("data.multiturn.enable") or newer or "data.messages_key" in made
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


def _module(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if is_sft(settings):
        return {"trainer.flow": "sft"}
    return Made(kind="refused", why="it trains nothing: megarl generate answers prompts, megarl eval scores a model")


def _length(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"data.max_prompt_length": value - value // 2, "data.max_response_length": value // 2}


def _place(column: str, to: str) -> Any:
    """The place of a text in a column that holds several."""

    def rule(value: Any, settings: Settings) -> Mapping[str, Any]:
        places = value if isinstance(value, list) else [value]
        return {to: ".".join([str(settings.of(column)), *map(str, places)])} if settings.of(column) and places else {}

    return rule


def _messages(value: Any, settings: Settings) -> Mapping[str, Any]:
    asked = settings.of("data.multiturn.enable")
    return {"data.messages_key": value} if value and (asked or asked is None) else {}


ENTRIES: tuple[Entry, ...] = (
    ruled(MODULE, "translated", "trainer.flow", "which of verl's trainers a command starts", _module),
    ruled(
        "data.max_length",
        "translated",
        "data.max_prompt_length, data.max_response_length",
        "half each: a conversation may have both together; change them where a prompt or an answer is longer",
        _length,
    ),
    ruled(
        "data.prompt_dict_keys",
        "translated",
        "data.prompt_key",
        "COLUMN.NAME is a place in a column",
        _place("data.prompt_key", "data.prompt_key"),
    ),
    ruled(
        "data.response_dict_keys",
        "translated",
        "data.answer_key",
        "COLUMN.NAME is a place in a column",
        _place("data.answer_key", "data.answer_key"),
    ),
    renamed("data.answer_key", "data.answer_key", "column of the answer"),
    ruled(
        "data.messages_key", "carried", "data.messages_key", "only of data.multiturn.enable, if it is set", _messages
    ),
    met("data.multiturn.enable", "data.messages_key names the conversations"),
    refused("data.multiturn.*", "the tokenizer's chat template shows the messages, and nothing beside them"),
    refused("data.tools_key", "the tokenizer's chat template shows the messages alone", nothing=(None, "tools")),
    refused(
        "data.enable_thinking_*",
        "data.apply_chat_template_kwargs is the same for all rows",
        nothing=(None, "enable_thinking", "none"),
    ),
    refused("data.chat_template", "the tokenizer's folder holds the chat template; change it there"),
    met("data.pad_mode", "sequences are always packed, never padded"),
    met("data.balance_dp_token", "trainer.balance_batch"),
    met("data.num_workers", "rows are looked at by all cores"),
    met("data.ignore_input_ids_mismatch", "a conversation is encoded once, as a whole"),
    refused(
        "trainer.profile_interval",
        "profiles are of chosen steps: profiler.tool, profiler.steps, profiler.ranks",
        nothing=(None, [-1, -1]),
    ),
    met_by("engine", ("megatron",), "always Megatron", "there is no FSDP: the layout is actor.megatron.*"),
    met_by("optim", ("megatron", "fsdp"), "the optimizer is Megatron-Core's AdamW", "the optimizer is AdamW"),
)

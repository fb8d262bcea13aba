"""verl's keys of the critic and the reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Entry, Settings, carried, met, met_by, refused, renamed, ruled
from megarl.migration.verl import C, J, budget
from megarl.migration.verl_policy import (
    FROM_HF,
    FSDP,
    PACKED,
    REMOTE,
    adapters,
    batching,
    fsdp,
    optimizer,
    profiles,
    sharded,
)
from megarl.migration.verl_transformer import overridden

CHECKPOINTED = "actor_rollout_ref.model.enable_gradient_checkpointing is for all models"
FORWARD = "its scores come from a forward pass on the training ranks: there is no server of it"


def _checkpointing(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"actor_rollout_ref.model.enable_gradient_checkpointing": True} if value else {}


def _model(section: str) -> list[Entry]:
    own = f"{section}.model"
    return [
        *carried(f"{own}.path", f"{own}.tokenizer_path"),
        met_by(f"{own}.use_remove_padding", (True, False), PACKED, PACKED),
        ruled(
            f"{own}.enable_gradient_checkpointing",
            "translated",
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            CHECKPOINTED,
            _checkpointing,
        ),
        met(f"{own}.use_shm", FROM_HF),
        refused(f"{own}.trust_remote_code", REMOTE),
        refused(f"{own}.external_lib", "extensions are files that keys name: path/to/file.py:function"),
        *adapters(own),
        refused(f"{own}.override_config.*", "a model is what its folder's config.json says; change the field there"),
        met(f"{own}.input_tokenizer", "responses reach it in the policy's tokens, or anew in its own"),
    ]


def _critic() -> list[Entry]:
    return [
        *carried(f"{C}.ppo_mini_batch_size", f"{C}.ppo_epochs", f"{C}.cliprange_value", f"{C}.loss_agg_mode"),
        met(f"{C}.enable", "an estimator that needs a critic brings one"),
        met(f"{C}.shuffle", "mini-batches are of a step's prompts in the order they were drawn"),
        met_by(f"{C}.strategy", ("megatron",), "always Megatron", FSDP),
        *_model(C),
        *batching(C),
        *optimizer(C),
        *sharded(C),
        *overridden(f"{C}.megatron.override_transformer_config"),
        *fsdp(f"{C}.model.fsdp_config", f"{C}.megatron", frozen=False),
        *profiles(C),
    ]


def _tokens(value: Any, settings: Settings) -> Mapping[str, Any]:
    rows = value if isinstance(value, int) and value > 0 else 1
    return {f"{J}.ppo_max_token_len_per_gpu": max(rows * budget(settings, J), budget(settings, J))}


def _judge() -> list[Entry]:
    why = "micro-batches are filled up to a number of tokens: as many as so many whole sequences"
    engine = f"{J}.rollout"
    return [
        ruled(f"{J}.enable", "translated", "reward.name", "reward.name=model has it score", _enable),
        met_by(f"{J}.strategy", ("megatron",), "always Megatron", FSDP),
        *_model(J),
        ruled(f"{J}.micro_batch_size_per_gpu", "translated", f"{J}.ppo_max_token_len_per_gpu", why, _tokens),
        met(f"{J}.micro_batch_size", why),
        met(f"{J}.use_dynamic_bsz", why),
        renamed(f"{J}.forward_max_token_len_per_gpu", f"{J}.ppo_max_token_len_per_gpu", "tokens of a micro-batch"),
        met(f"{J}.max_length", "as long as a prompt and its response are"),
        met(
            f"{J}.use_reward_loop", "responses are always scored as they finish; a model scores them when all are there"
        ),
        renamed(f"{J}.num_workers", "reward.workers", "processes that score, per node"),
        renamed(f"{engine}.tensor_model_parallel_size", f"{J}.megatron.tensor_model_parallel_size", "its own layout"),
        met(f"{engine}.name", FORWARD),
        met(f"{engine}.gpu_memory_utilization", FORWARD),
        met(f"{engine}.prompt_length", FORWARD),
        met(f"{engine}.response_length", FORWARD),
        met(f"{engine}.*", FORWARD),
        refused(
            f"{J}.enable_resource_pool", "all models are on the same ranks, and leave the GPU between their phases"
        ),
        met(f"{J}.n_gpus_per_node", "all models are on the same ranks"),
        met(f"{J}.nnodes", "all models are on the same ranks"),
        *sharded(J),
        *fsdp(f"{J}.model.fsdp_config", f"{J}.megatron", frozen=True),
        *profiles(J),
    ]


def _enable(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"reward.name": "model"} if value else {}


ENTRIES: tuple[Entry, ...] = (*_critic(), *_judge())

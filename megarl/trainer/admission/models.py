"""Checks layouts, model files and exports against the architecture of the policy."""

from __future__ import annotations

import os
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch

from megarl.checkpoint.folder import check_whole
from megarl.checkpoint.huggingface_folder import check_weights, refuse_remote_code
from megarl.checkpoint.megatron_lm import check_arguments, check_format, is_megatron_lm, newest_iteration
from megarl.config import Config
from megarl.flow_kinds import flow_kind, generates, trains
from megarl.models.architecture import Architecture
from megarl.rollout.kinds import engine_kind
from megarl.trainer.admission.other_models import check_other_layouts
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import (
    check_padding,
    check_router_losses,
    check_shared_prompts,
    generation_layout,
    train_layout,
)
from megarl.trainer.needs import needs_of
from megarl.trainer.resuming.model_files import write_exported_files


def check_shapes(config: Config, arch: Architecture) -> None:
    """Check that the layouts can hold the models, the models the sequences, and the engine all of it."""
    layout, actor = train_layout(config), config.actor_rollout_ref.actor
    arch.check_training(layout, sequence_parallel=actor.megatron.sequence_parallel)
    check_router_losses("actor", actor.megatron, trains_experts=arch.moe is not None)
    check_shared_prompts("actor", config.actor_rollout_ref.model, actor.megatron, arch)
    check_padding("actor", config.actor_rollout_ref.model, layout)
    if actor.megatron.cp_comm_type != layout.context.name:
        raise ValueError("actor.megatron.cp_comm_type needs context_parallel_size of 2 or more")
    arch.check_generation(generation_layout(config).split)
    if generates(config):
        rollout = config.actor_rollout_ref.rollout
        engine_kind(rollout.name).check(rollout, arch, trains=trains(config))
        _check_routing_replay(config, arch)
    longest = config.data.max_sequence_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    if longest > arch.max_position_embeddings:
        raise ValueError(f"{what} is more than the model's {arch.max_position_embeddings} positions")
    _check_recomputed(config, arch)
    _check_overrides(config, arch)
    if trains(config) and actor.use_dynamic_bsz and longest > actor.most_tokens(actor.megatron):
        limit = actor.limit(actor.megatron)
        raise ValueError(
            f"{what} is more than actor.ppo_max_token_len_per_gpu = {limit}: raise it, or lower the lengths"
        )
    if generates(config):
        check_other_layouts(config, arch, needs_of(config))


def _check_routing_replay(config: Config, arch: Architecture) -> None:
    roles = config.actor_rollout_ref
    if not roles.rollout.enable_rollout_routing_replay:
        return
    key = "rollout.enable_rollout_routing_replay"
    if arch.moe is None:
        raise ValueError(f"{key}: the model has no experts whose choice could be replayed; leave it off")
    if not engine_kind(roles.rollout.name).records_routing:
        raise ValueError(
            f"{key}: rollout.name = {roles.rollout.name} does not record the experts of tokens here; set "
            "rollout.name=native"
        )
    if roles.actor.megatron.override_transformer_config.get("moe_router_fusion"):
        raise ValueError(
            f"{key}: the fused router of override_transformer_config.moe_router_fusion takes no choices; leave one of "
            "the two off"
        )


def _check_recomputed(config: Config, arch: Architecture) -> None:
    there = {layer.mlp.recomputed_as for layer in arch.kinds}
    for name in config.actor_rollout_ref.model.recompute_modules:
        if name not in there:
            what = {"mlp": "an MLP without experts", "moe": "experts"}[name]
            raise ValueError(f"model.recompute_modules: no layer of the model has {what}; leave {name} out")


def _check_overrides(config: Config, arch: Architecture) -> None:
    model, megatron = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    if not megatron.override_transformer_config:
        return
    from megarl.models.overrides import check_overrides  # imports Megatron-Core, which takes seconds

    check_overrides(
        megatron.override_transformer_config,
        arch,
        train_layout(config),
        dtype=getattr(torch, model.dtype),
        sequence_parallel=megatron.sequence_parallel,
        recompute=model.recomputed,
    )


def check_model_files(inputs: Inputs) -> Inputs:
    """Check engine, tokenizer and weights against the architecture; returns the inputs with remarks on the weights."""
    arch, config = inputs.arch, inputs.config.actor_rollout_ref
    model, rollout = config.model, config.rollout
    try:
        refuse_remote_code(model.folder)
    except ValueError as e:
        raise ValueError(f"actor_rollout_ref.model.path: {e}") from e
    if generates(inputs.config):
        engine_kind(rollout.name).check_here(rollout, arch, model.folder, on_gpu=torch.cuda.is_available())
    if inputs.tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"the tokenizer has {inputs.tokenizer.vocab_size} tokens, the model's vocab_size is only {arch.vocab_size}"
        )
    scores = flow_kind(inputs.config).scores
    if model.checkpoint and scores:
        raise ValueError(
            "actor_rollout_ref.model.checkpoint: a reward model begins as a Hugging Face folder; set "
            "actor_rollout_ref.model.path to the checkpoint's huggingface/ (hf_model in checkpoint.save_contents)"
        )
    if model.checkpoint:
        try:
            return _check_checkpoint(inputs, newest_iteration(model.checkpoint))
        except ValueError as e:
            raise ValueError(f"actor_rollout_ref.model.checkpoint: {e}") from e
    elif not model.random_init:
        try:
            check_weights(model.folder, arch.with_scalar_output() if scores else arch)
        except ValueError as e:
            raise ValueError(f"actor_rollout_ref.model.path: {e} (random_init=true starts without weights)") from e
    return inputs


def _check_checkpoint(inputs: Inputs, folder: str) -> Inputs:
    """Check a checkpoint whose weights a run begins with."""
    if not is_megatron_lm(folder):
        check_whole(folder)
        return inputs
    check_format(folder)
    remark = check_arguments(folder, inputs.arch)
    if "RANK" not in os.environ:  # ranks look at the tensors when they read them
        from megarl.checkpoint.megatron_folder import MegatronWeights  # imports Megatron-Core, which takes seconds

        MegatronWeights(folder, inputs.arch)
    return inputs if remark is None else replace(inputs, remarks=(*inputs.remarks, remark))


def check_export(inputs: Inputs) -> Inputs:
    """Write the files of an export, without weights: a save must not be the first to find that they cannot be read.

    Returns:
        the inputs with remarks on the files.
    """
    with TemporaryDirectory() as folder:
        try:
            remarks = write_exported_files(inputs, folder)
        except OSError as e:
            raise ValueError(f"hf_model in checkpoint.save_contents: {e}; leave it out") from e
    return replace(inputs, remarks=(*inputs.remarks, *(f"remark: {remark}" for remark in remarks)))

"""Derives the layouts that a configuration asks for. Torch-free."""

from __future__ import annotations

from megarl.config import Config
from megarl.config.load import build_config
from megarl.config.policy import MegatronConfig, ModelConfig
from megarl.flow_kinds import generates
from megarl.models.architecture import Architecture
from megarl.parallel.context import ALL_TO_ALL, CONTEXT_KINDS
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import GenerationLayout, TrainLayout, closest_stride
from megarl.parallel.pipeline_split import PipelineSplit
from megarl.rollout.kinds import engine_kind


def train_layout(config: Config, megatron: MegatronConfig | None = None) -> TrainLayout:
    """Return the training layout of the actor, or of the model with other Megatron keys.

    Raises:
        ValueError: the ranks cannot be split that way, or keys of the pipeline contradict each other.
    """
    megatron = megatron or config.actor_rollout_ref.actor.megatron
    split = split_of(megatron)
    return TrainLayout(
        ranks=range(config.trainer.world_size),
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        chunks=split.chunks(megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size),
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        split=split,
        context=CONTEXT_KINDS[megatron.cp_comm_type] if megatron.context_parallel_size > 1 else ALL_TO_ALL,
    )


def split_of(megatron: MegatronConfig) -> PipelineSplit:
    """Return how a model's keys divide its layers; raises ValueError for keys that contradict each other."""
    return PipelineSplit(
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=megatron.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=megatron.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=megatron.pipeline_model_parallel_layout,
    )


def check_megatron(megatron: MegatronConfig) -> None:
    """Raise ValueError, with what to change, for keys that do not go together."""
    if megatron.virtual_pipeline_model_parallel_size and megatron.pipeline_model_parallel_size == 1:
        raise ValueError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size of 2 or more")
    if megatron.overlap_param_gather and not (megatron.use_distributed_optimizer and megatron.overlap_grad_reduce):
        raise ValueError("overlap_param_gather needs use_distributed_optimizer=true and overlap_grad_reduce=true")


def check_padding(role: str, model: ModelConfig, layout: TrainLayout) -> None:
    """Raise ValueError if sequences are padded that the ranks cannot share then."""
    if (why := layout.context.no_padding) and not model.use_remove_padding:
        raise ValueError(
            f"{role}.megatron.cp_comm_type = {layout.context.name}: {why}; set model.use_remove_padding=true"
        )


def check_shared_prompts(role: str, model: ModelConfig, megatron: MegatronConfig, arch: Architecture) -> None:
    """Raise ValueError if prompts that sequences have in common cannot be computed once."""
    if not model.use_prefix_grouper:
        return
    key = "model.use_prefix_grouper"
    if not model.use_remove_padding:
        raise ValueError(f"{key}: padded sequences share no prompt; set model.use_remove_padding=true")
    if arch.recurrent:
        raise ValueError(f"{key}: linear attention in the {role} goes on with one sequence alone; leave it off")
    if megatron.moe_aux_loss_coeff or megatron.moe_z_loss_coeff:
        raise ValueError(
            f"{key}: moe_aux_loss_coeff and moe_z_loss_coeff of the {role} count the tokens of each sequence; leave "
            "either off"
        )


def check_router_losses(role: str, megatron: MegatronConfig, *, trains_experts: bool) -> None:
    """Raise ValueError for a loss of routers where none is trained."""
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if getattr(megatron, name) and not trains_experts:
            raise ValueError(f"{role}.megatron.{name}: no experts are trained there; leave it out")


def generation_layout(config: Config) -> GenerationLayout:
    """Return the generation layout of the configuration; raises ValueError if the ranks do not divide.

    Every rank is a replica of its own in a run that generates nothing.
    """
    if not generates(config):
        return GenerationLayout(ranks=range(config.trainer.world_size), tp=1, stride=1)
    rollout = config.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    stride = closest_stride(train_layout(config), tp) if engine_kind(rollout.name).strided else 1
    ep = TensorSplit.of_replica(tp, enable_expert_parallel=rollout.enable_expert_parallel).ep
    return GenerationLayout(ranks=range(config.trainer.world_size), tp=tp, stride=stride, ep=ep)


def with_ranks(config: Config, dp: int) -> Config | None:
    """Return the configuration on one machine with so many data-parallel ranks; None if its layouts do not divide."""
    tree = config.model_dump()
    tree["trainer"] |= {"nnodes": 1, "n_gpus_per_node": dp * train_layout(config).block_size}
    changed = build_config(tree)
    try:
        generation_layout(changed)
        for section in (changed.actor_rollout_ref.actor, changed.critic, changed.reward_model, changed.teacher):
            train_layout(changed, section.megatron)
    except ValueError:
        return None
    return changed

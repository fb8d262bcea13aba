"""verl's own values of keys that have no counterpart: a file of its defaults asks for nothing by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

USUAL: Mapping[str, Sequence[Any]] = {
    "*.strategy": ("fsdp",),
    "engine": ("fsdp",),
    "model_engine": ("dp", "fsdp"),
    "*.use_torch_compile": (True,),
    "*.seed": (42,),
    "*.data_loader_seed": (42,),
    "*.entropy_from_logits_chunk_size": (2048,),
    "*.pad_to_length_bucket": (512, 1024),
    "*.pad_bshd_to_minibatch_max": (True,),
    "*.use_remove_padding": (True,),
    "*.forward_only": (True,),
    "*.turbo_config.*": (1, 16, "native", "bf16", "fp32"),
    "*.fsdp*.dtype": ("bfloat16",),
    "*.fsdp*.ulysses_sequence_parallel_size": (1,),
    "*.fsdp.*": ("fp32", -1, True),
    "*.attention_backend": ("flash", "auto"),
    "*.recompute_modules": (["core_attn"],),
    "*.optim.lr_wsd_decay_style": ("exponential",),
    "*.optim.weight_decay_incr_style": ("constant",),
    "*.optim.*_dtype": ("fp32",),
    "*.optim.num_cycles": (0.5,),
    "*.optim.zero_indexed_step": (True,),
    "*.impl_backend": ("torch",),
    "*.router_replay.mode": ("disabled",),
    "*.nccl_timeout": (600,),
    "*.agent.default_agent_loop": ("single_turn_agent",),
    "actor_rollout_ref.rollout.logprobs_mode": ("processed_logprobs",),
    "actor_rollout_ref.rollout.scheduling_policy": ("fcfs",),
    "actor_rollout_ref.rollout.n_gpus_per_node": (8,),
    "data.image_patch_size": (14,),
    "reward.reward_manager.source": ("register",),
    "reward.reward_manager.module.name": ("custom_reward_manager",),
    "reward_model.sandbox_fusion.*": (64, 1024),
}
"""Patterns of keys by the tables' names, with the values of verl 0.9's generated files and of older ones."""

"""Renames keys of verl's other trainers and newer versions as its PPO trainer has them."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.migration.verl import A

M, OPTIM = "actor_rollout_ref.model", f"{A}.optim"
_NAMES: Mapping[str, str] = {
    "model.partial_pretrain": f"{M}.path",
    "optim.warmup_steps_ratio": f"{OPTIM}.lr_warmup_steps_ratio",
    "optim.lr_scheduler": f"{OPTIM}.lr_scheduler_type",
    "engine.ulysses_sequence_parallel_size": f"{A}.ulysses_sequence_parallel_size",
    "ulysses_sequence_parallel_size": f"{A}.ulysses_sequence_parallel_size",
    "use_remove_padding": f"{M}.use_remove_padding",
    "engine.use_remove_padding": f"{M}.use_remove_padding",
    "engine.strategy": f"{A}.strategy",
    "data.micro_batch_size_per_gpu": f"{A}.ppo_micro_batch_size_per_gpu",
    "data.micro_batch_size": f"{A}.ppo_micro_batch_size",
    "data.use_dynamic_bsz": f"{A}.use_dynamic_bsz",
    "data.max_token_len_per_gpu": f"{A}.ppo_max_token_len_per_gpu",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.response_key": "data.answer_key",
    "trainer.seed": "data.seed",
    "trainer.resume_path": "trainer.resume_from_path",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": "algorithm.rollout_correction.bypass_mode",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward_model.sandbox_fusion_url": "reward_model.sandbox_fusion.url",
    f"{A}.use_prefix_grouper": f"{M}.use_prefix_grouper",
    f"{A}.compute_sum_pi_squared": f"{A}.calculate_sum_pi_squared",
    "algorithm.use_token_level_loss": f"{A}.use_token_level_loss",
    **{
        f"algorithm.{name}": f"{A}.{name}"  # as people write DAPO down
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
    },
}
_SECTIONS: Mapping[str, str] = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_model.": "reward_model.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "reward_model.overlong_buffer.": "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "algorithm.overlong_buffer.": "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.model.rollout.": "reward_model.rollout.",
    "model.fsdp_config.": f"{A}.fsdp_config.",
    "model.": f"{M}.",
    "optim.": f"{OPTIM}.",
    "profiler.": f"{A}.profiler.",
    "checkpoint.": f"{A}.checkpoint.",
    "trainer.checkpoint.": f"{A}.checkpoint.",
    "trainer.rollout_trace.": "actor_rollout_ref.rollout.trace.",
}
_LEAVES: Mapping[str, str] = {
    "use_rmpad": "use_remove_padding",
    "enable_activation_offloading": "enable_activation_offload",
    "profile_ranks": "profiler.ranks",
    "profile_ranks_all": "profiler.all_ranks",
    "profile_discrete": "profiler.discrete",
}
"""Last parts of keys, of any model."""
_OF_FSDP = (
    "fsdp_size", "wrap_policy", "offload_policy", "reshard_after_forward", "forward_prefetch", "model_dtype", "qat",
    "use_orig_params", "mixed_precision", "turbo_config", "full_determinism", "use_torch_compile", "pad_to_length",
    "pad_to_length_bucket", "entropy_from_logits_chunk_size", "use_no_sync_for_gradient_accumulation", "forward_only",
)  # fmt: skip


def canonical(key: str) -> str:
    """Find the name that the tables have for a key of the demonstrations trainers, or of a newer version; other keys
    stay as they are."""
    if key in _NAMES:
        return _NAMES[key]
    section, _, rest = key.partition(".")
    if section == "engine" and rest:
        return f"{A}.{'fsdp_config' if rest.split('.')[0] in _OF_FSDP else 'megatron'}.{rest}"
    head = next((head for head in _SECTIONS if key.startswith(head)), "")
    key = _SECTIONS[head] + key.removeprefix(head) if head else key
    model, _, leaf = key.rpartition(".")
    return f"{model}.{_LEAVES[leaf]}" if model and leaf in _LEAVES else key

"""OpenRLHF's options by one name: that of 0.11, `--actor.adam.lr` for what was `--actor_learning_rate` before."""

from __future__ import annotations

from collections.abc import Mapping

TRAINER = "trainer"
"""The setting that names a trainer: `train_ppo_ray`, say."""

_SINCE_0_11: Mapping[str, str] = {
    # models
    "pretrain": "actor.model_name_or_path",
    "model_name_or_path": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "reward_model_path": "reward.model_name_or_path",
    "sft_model_path": "load_model",
    "actor_init_on_gpu": "actor_init_on_gpu",
    "vllm_is_correction_type": "vllm_is_correction_type",
    "vllm_is_truncated_threshold": "vllm_is_truncated_threshold",
    "ref_pretrain": "ref.model_name_or_path",
    "ref_model_name_or_path": "ref.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "value_head_prefix": "ds.value_head_prefix",
    "ref_offload": "ref.offload",
    "ref_reward_offload": "reward.offload",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "aux_loss_coef": "actor.aux_loss_coef",
    "beta": "model.beta",
    "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing",
    "nll_loss_coef": "model.nll_loss_coef",
    "loss": "model.loss_type",
    "margin_loss": "model.margin_loss_enable",
    "compute_fp32_loss": "model.compute_fp32_loss_enable",
    "pretrain_mode": "model.pretrain_mode_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "save_value_network": "critic.save_value_network",
    # nodes and engines
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "vllm_enable_is_correction": "enable_vllm_is_correction",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "fsdp2_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "flash_attn": "ds.attn_implementation",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    # batches and steps
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "agent_func_path": "train.agent_func_path",
    "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta",
    "full_determinism": "train.full_determinism_enable",
    # generation
    "generate_max_len": "rollout.max_new_tokens",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    # algorithm
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_estimator_k3": "algo.kl.estimator_k3",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    # optimizer
    "learning_rate": "actor.adam.lr",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    # rows
    "dataset": "data.dataset",
    "prompt_data": "data.dataset",
    "data.prompt_dataset": "data.dataset",
    "dataset_probs": "data.dataset_probs",
    "prompt_data_probs": "data.dataset_probs",
    "data.prompt_probs": "data.dataset_probs",
    "dataset_split": "data.dataset_split",
    "prompt_split": "data.dataset_split",
    "data.prompt_split": "data.dataset_split",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer",
    "max_samples": "data.max_samples",
    "prompt_max_len": "data.prompt_max_len",
    "image_key": "data.image_key",
    # the run
    "eval_steps": "eval.steps",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "save_path": "ckpt.output_dir",
    "ckpt_save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "save_hf_model": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "best_metric_key": "ckpt.best_metric_key",
    "use_universal_ckpt": "ds.use_universal_ckpt",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
}  # fmt: skip
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "train": ("max_epochs", "num_episodes", "seed"),
    "rollout": ("temperature", "top_p"),
    "actor": ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm"),
    "data": (
        "max_len", "input_key", "output_key", "label_key", "prompt_key", "chosen_key", "rejected_key", "multiturn",
        "input_template", "apply_chat_template", "tokenizer_chat_template",
    ),
    "ds": (
        "zero_stage", "zpg", "bf16", "param_dtype", "adam_offload", "use_liger_kernel", "grad_accum_dtype",
        "overlap_comm", "packing_samples", "load_in_4bit", "deepcompile", "attn_implementation",
    ),
}  # fmt: skip
"""Options that only lacked their section."""

_ENTITIES = ("actor", "critic", "ref", "reward", "vllm")


def canonical(option: str) -> str:
    """An option's name in the table; of trainers with one model, and of forks with another backend, too."""
    if option in _SINCE_0_11:
        return _SINCE_0_11[option]
    head, _, rest = option.partition(".")
    if not rest:
        section = next((section for section, options in _SECTIONS.items() if option in options), None)
        entity, _, own = option.partition("_")
        of_entity = entity in _ENTITIES and own and section is None
        return f"{section}.{option}" if section else f"{entity}.{own}" if of_entity else option
    if head == "fsdp":
        return f"ds.{rest}"
    if head in ("adam", "muon"):
        return f"actor.{option}"
    if head == "model" and (rest.startswith("gradient_") or rest in ("model_name_or_path", "aux_loss_coef")):
        return f"actor.{rest}"
    return option

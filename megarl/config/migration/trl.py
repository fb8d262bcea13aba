"""Fields of TRL's GRPOConfig, PPOConfig, SFTConfig, DPOConfig and of the arguments beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.migration.entry import Entry, Made, Settings, met, met_by, refused, renamed, ruled, worded

A, R, D = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "data"
M, OPTIM = "actor_rollout_ref.model", "actor_rollout_ref.actor.optim"

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
    "num_generations": 8,
}

_OF_PPO = {
    *(
        "num_ppo_epochs",
        "cliprange",
        "cliprange_value",
        "kl_coef",
        "kl_estimator",
        "reward_model_path",
        "sft_model_path",
    ),
    *(
        "response_length",
        "whiten_rewards",
        "vf_coef",
        "lam",
        "num_mini_batches",
        "missing_eos_penalty",
        "total_episodes",
    ),
    *("local_rollout_forward_batch_size", "num_sample_generations", "stop_token"),
}
"""Fields of PPOConfig that GRPOConfig has not."""

_OF_FLOWS = {
    "ppo": {
        *_OF_PPO,
        *("num_generations", "max_completion_length", "use_vllm", "vllm_mode", "epsilon", "epsilon_high", "delta"),
        *("num_iterations", "scale_rewards", "reward_funcs", "reward_weights", "generation_batch_size", "temperature"),
        *("steps_per_generation", "mask_truncated_completions", "importance_sampling_level", "top_p", "top_k"),
    },
    "preference": {"loss_type", "rpo_alpha", "precompute_ref_log_probs", "label_smoothing", "reference_free"},
}
LORA = "there are no adapters: all weights are trained, spread by actor.megatron.tensor_model_parallel_size"
BACKEND = (
    "there is no DeepSpeed and no FSDP: actor.megatron.tensor_model_parallel_size and "
    "pipeline_model_parallel_size spread the model, use_distributed_optimizer the optimizer's state"
)
REMOTE = "no code of a model's folder is run; the families of megarl/models/families load without"
FILES = "rows are files: data.train_files=[x.jsonl] or parquet, also globs and s3:// URIs"
ROLLOUTS = "sample rollouts of every step are written to the run folder: trainer.log_rollouts"


def flow_of(settings: Settings) -> str:
    """Which flow has these fields: "ppo" for GRPO and PPO, "preference" for DPO, "sft" without any of theirs.

    Raises:
        ValueError: they may be of several.
    """
    flow = next((flow for flow, names in _OF_FLOWS.items() if names & set(settings)), None)
    if flow is None and "beta" in settings:
        raise ValueError(
            "of TRL's trainers GRPO, DPO, ORPO and KTO have a beta: name another field of yours, too, such as "
            "num_generations=8 (GRPO) or loss_type=sigmoid (DPO)"
        )
    return flow or "sft"


def _is_ppo(settings: Settings) -> bool:
    """PPOTrainer, not GRPOTrainer."""
    return not _OF_PPO.isdisjoint(settings)


def _mini_batches(settings: Settings) -> int:
    """Optimizer steps of one pass over what is generated at a time."""
    rows = settings.number("per_device_train_batch_size", 8) * settings.number("num_processes")
    accumulated = settings.number("gradient_accumulation_steps")
    generated = settings.number("generation_batch_size", 0)
    passed = generated // rows if generated else settings.number("steps_per_generation", accumulated)
    return max(1, passed // accumulated) if flow_of(settings) == "ppo" else 1


def complete(settings: Settings, made: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The flow, and the algorithm that the trainer's class stands for."""
    default = "TRL's default"
    flow, own = flow_of(settings), "a step of per_device_train_batch_size x gradient_accumulation_steps x num_processes"
    added: dict[str, tuple[Any, str]] = {
        "trainer.flow": (flow, "these fields are of that kind of training"),
        "data.train_batch_size": (_rows(settings) * _mini_batches(settings), own),
        f"{OPTIM}.lr_decay_style": ("linear", default),
        f"{OPTIM}.weight_decay": (0.0, default),
        "trainer.total_epochs": (3, default),
    }
    if flow == "ppo":
        ppo = _is_ppo(settings)
        added |= {
            "algorithm.adv_estimator": ("gae" if ppo else "grpo", "the trainer's"),
            f"{A}.ppo_mini_batch_size": (_rows(settings), own),
            f"{R}.n": (1 if ppo else settings.of("num_generations"), default),
            "data.max_response_length": (53 if ppo else 256, default),
        }
        if ppo:
            added |= {
                "algorithm.use_kl_in_reward": (settings.of("kl_coef") != 0, default),
                "algorithm.kl_ctrl.kl_coef": (0.05, default),
                "algorithm.lam": (0.95, default),
                f"{A}.ppo_epochs": (4, default),
                "critic.ppo_epochs": (4, default),
                "critic.cliprange_value": (0.2, default),
            }
    return added


def _rows(settings: Settings) -> int:
    """Prompts of a step: TRL's GRPO counts completions."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    rows = settings.number(names[0], 8) * settings.number(names[1]) * settings.number(names[2])
    if flow_of(settings) == "ppo" and not _is_ppo(settings):
        rows //= settings.number("num_generations", 8)
    return max(1, rows)


def _beta(value: Any, settings: Settings) -> Mapping[str, Any]:
    if flow_of(settings) == "preference":
        return {"algorithm.preference.beta": value} if value else {}
    return {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": value} if value else {}


def _loss(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if flow_of(settings) == "preference":
        losses = {"sigmoid": "dpo", "ipo": "ipo", "dpo": "dpo", "simpo": "simpo", "orpo": "orpo"}
        if value not in losses:
            return Made(kind="refused", why="megarl algorithms lists the losses on pairs: dpo, ipo, simpo, orpo")
        return {"algorithm.preference.loss_mode": losses[value]}
    aggregations = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean"}
    aggregations |= {"dr_grpo": "seq-mean-token-sum-norm"}
    if value not in aggregations:
        return Made(kind="refused", why="actor.loss_agg_mode and actor.policy_loss.loss_mode say what is summed")
    return {f"{A}.loss_agg_mode": aggregations[value]}


def _scale(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value == "batch":
        return Made(kind="refused", why="advantages are divided by the group's deviation or by nothing")
    return {"algorithm.norm_adv_by_std_in_grpo": value in (True, "group")}


def _level(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.policy_loss.loss_mode": "gspo"} if str(value).startswith("sequence") else {}


def _batch(value: Any, settings: Settings) -> Mapping[str, Any]:
    rows = _rows(settings)
    batch = rows * _mini_batches(settings)
    return {"data.train_batch_size": batch} | ({f"{A}.ppo_mini_batch_size": rows} if flow_of(settings) == "ppo" else {})


def _report(value: Any, settings: Settings) -> Made:
    wanted = [value] if isinstance(value, str) else list(value or [])
    there = [name for name in wanted if name in settings.loggers]
    gone = [name for name in wanted if name not in (*settings.loggers, "none", "all")]
    kept = {"trainer.logger": ["console", "jsonl", *there]}
    if gone:
        return Made(kind="refused", values=kept, why=f"no logger {', '.join(gone)} here: tensorboard, csv or a class")
    return Made(kind="translated", values=kept, why="loggers")


def _dataset(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if str(value).endswith((".jsonl", ".parquet")):
        return {"data.train_files": [value]}
    return Made(kind="refused", why=FILES)


def _schedule(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if value not in names:
        return Made(kind="refused", why="lr_decay_style is constant, linear or cosine; min_lr is where it ends")
    return {f"{OPTIM}.lr_decay_style": names[value]}


def _dtype(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value not in ("bfloat16", "float32", None, "auto"):
        return Made(kind="refused", why="weights are bfloat16 or float32")
    return {f"{M}.dtype": value} if value in ("bfloat16", "float32") else {}


def _engine(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{R}.name": "vllm" if value else "native"}


def _steps(key: str, to: str, why: str) -> Entry:
    """Of optimizer steps; here a step is a generated batch."""

    def rule(value: Any, settings: Settings) -> Mapping[str, Any]:
        if not isinstance(value, int) or value <= 0:
            return {}
        return {to: max(1, value // (_mini_batches(settings) * settings.number("num_iterations")))}

    return ruled(key, "translated", to, why, rule)


def _processes(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    nodes = settings.number("num_machines")
    if not isinstance(value, int) or value % nodes:
        return Made(kind="refused", why=f"{value} processes do not divide over {nodes} machines")
    return {"trainer.n_gpus_per_node": value // nodes}


def _training() -> list[Entry]:
    batch = "prompts of a step, over all ranks"
    return [
        renamed("model_name_or_path", f"{M}.path", "a local Hugging Face folder"),
        ruled("dataset_name", "translated", "data.train_files", FILES, _dataset),
        refused("dataset_config", FILES),
        refused("dataset_train_split", FILES, nothing=(None, "train")),
        refused("dataset_test_split", "held-out rows are data.val_files", nothing=(None, "test")),
        renamed("learning_rate", f"{OPTIM}.lr", "peak learning rate"),
        renamed("weight_decay", f"{OPTIM}.weight_decay", "AdamW's"),
        renamed("adam_beta1", f"{OPTIM}.adam_beta1", "AdamW's"),
        renamed("adam_beta2", f"{OPTIM}.adam_beta2", "AdamW's"),
        renamed("adam_epsilon", f"{OPTIM}.adam_eps", "AdamW's"),
        renamed("max_grad_norm", f"{OPTIM}.clip_grad", "L2 norm of all gradients"),
        renamed("warmup_steps", f"{OPTIM}.lr_warmup_steps", "linear"),
        renamed("warmup_ratio", f"{OPTIM}.lr_warmup_steps_ratio", "linear"),
        ruled("lr_scheduler_type", "translated", f"{OPTIM}.lr_decay_style", "after the warm-up", _schedule),
        refused("lr_scheduler_kwargs", "lr_decay_style and min_lr"),
        met_by("optim", ("adamw_torch", "adamw_torch_fused", "adamw_hf"), "always AdamW", "the optimizer is AdamW"),
        ruled("per_device_train_batch_size", "translated", "data.train_batch_size", batch, _batch),
        ruled("gradient_accumulation_steps", "translated", "data.train_batch_size", batch, _batch),
        met("per_device_eval_batch_size", "the engine takes all validation prompts, as many at a time as fit"),
        ruled("num_processes", "translated", "trainer.n_gpus_per_node", "of all machines; here of one", _processes),
        renamed("num_machines", "trainer.nnodes", "nodes"),
        renamed("num_train_epochs", "trainer.total_epochs", "passes over the rows", lambda value: max(1, round(value))),
        _steps("max_steps", "trainer.total_training_steps", "a step here is a generated batch"),
        renamed("seed", "data.seed", "data order, weights and sampling"),
        renamed("data_seed", "data.seed", "data order, weights and sampling"),
        renamed("output_dir", "trainer.default_local_dir", "the run folder"),
        renamed("run_name", "trainer.experiment_name", "names the run"),
        ruled("report_to", "translated", "trainer.logger", "loggers", _report),
        met("logging_steps", "every step is a row of metrics"),
        met("logging_first_step", "every step is a row of metrics"),
        met("logging_strategy", "every step is a row of metrics"),
        _steps("save_steps", "trainer.save_freq", "steps between checkpoints, of a generated batch each"),
        renamed("save_total_limit", "trainer.max_ckpt_to_keep", "older ones are deleted"),
        met_by("save_strategy", ("steps",), "trainer.save_freq", "checkpoints are counted in steps: trainer.save_freq"),
        _steps("eval_steps", "trainer.test_freq", "steps between validations, of a generated batch each"),
        met_by(
            "eval_strategy", ("steps", "no"), "trainer.test_freq", "validations are counted in steps: trainer.test_freq"
        ),
        met_by("do_eval", (True,), "data.val_files", "leave data.val_files empty"),
        ruled(
            "bf16", "translated", f"{M}.dtype", "weights' type", lambda v, _: {f"{M}.dtype": "bfloat16"} if v else {}
        ),
        refused("fp16", "weights are bfloat16 or float32: float16 needs loss scaling, which is not here"),
        met("tf32", "torch's setting"),
        ruled("dtype", "translated", f"{M}.dtype", "weights' type", _dtype),
        ruled("torch_dtype", "translated", f"{M}.dtype", "weights' type", _dtype),
        renamed("gradient_checkpointing", f"{M}.enable_gradient_checkpointing", "activations are recomputed"),
        met("gradient_checkpointing_kwargs", "activations are recomputed layer by layer"),
        met("attn_implementation", "the program chooses the attention kernels"),
        met("remove_unused_columns", "rewards, environments and agents always have the whole row"),
        met("dataset_num_proc", "rows are looked at by all cores"),
        met("dataloader_num_workers", "rows lie mapped on disk"),
        met("use_liger_kernel", "the vocabulary's logits are never held whole"),
        met("use_liger_loss", "the vocabulary's logits are never held whole"),
        renamed(
            "resume_from_checkpoint",
            "trainer.resume_mode",
            "the newest whole one",
            lambda v: "auto" if v else "disable",
        ),
        refused("deepspeed", BACKEND),
        refused("fsdp", BACKEND, nothing=(None, "", [])),
        refused("fsdp_config", BACKEND),
        refused("push_to_hub", "checkpoint.save_hf=true writes a Hugging Face folder with each checkpoint"),
        refused("use_peft", LORA),
        refused("lora_*", LORA, nothing=(None,)),
        refused("load_in_*", "weights are not quantized"),
        refused("trust_remote_code", REMOTE),
        refused("neftune_noise_alpha", "no noise is added to embeddings"),
        refused("load_best_model_at_end", "trainer.best_metric keeps the step with the best validation"),
        refused("metric_for_best_model", "trainer.best_metric=val/accuracy, say"),
    ]


def _generation() -> list[Entry]:
    weighed = "algorithm.rollout_correction weighs for the engine's distribution"
    return [
        renamed("num_generations", f"{R}.n", "responses to a prompt"),
        renamed("max_prompt_length", "data.max_prompt_length", "tokens", lambda value: value),
        renamed("max_completion_length", "data.max_response_length", "tokens generated at most"),
        renamed("response_length", "data.max_response_length", "tokens generated at most"),
        renamed("temperature", f"{R}.temperature", "sampling"),
        renamed("top_p", f"{R}.top_p", "nucleus sampling"),
        renamed("top_k", f"{R}.top_k", "-1 keeps the whole vocabulary", lambda value: value or -1),
        refused("min_p", "sampling has temperature, top_p and top_k"),
        refused("repetition_penalty", "responses are drawn from the policy itself", nothing=(None, 1, 1.0)),
        refused("generation_kwargs", "rollout.temperature, top_p, top_k, stop and stop_token_ids"),
        ruled("use_vllm", "translated", f"{R}.name", "vllm in the ranks' processes, or the built-in engine", _engine),
        met_by(
            "vllm_mode",
            ("colocate",),
            "the engine is in the ranks' processes",
            "there is no server: ranks train and generate",
        ),
        refused("vllm_server_*", "there is no server: ranks train and generate"),
        renamed("vllm_gpu_memory_utilization", f"{R}.gpu_memory_utilization", "the engine's part"),
        renamed("vllm_tensor_parallel_size", f"{R}.tensor_model_parallel_size", "ranks of a replica"),
        met("vllm_enable_sleep_mode", "the engine gives its memory back between phases: rollout.free_cache_engine"),
        met("vllm_max_model_length", "data.max_prompt_length + data.max_response_length"),
        ruled(
            "vllm_importance_sampling_correction",
            "translated",
            "algorithm.rollout_correction.rollout_is",
            weighed,
            lambda value, _: {"algorithm.rollout_correction.rollout_is": "token"} if value else {},
        ),
        renamed("vllm_importance_sampling_cap", "algorithm.rollout_correction.rollout_is_threshold", weighed),
        met("ds3_gather_for_generation", "a reshard moves the weights into the engine's layout"),
        met("cache_implementation", "the KV cache is paged"),
        ruled("generation_batch_size", "translated", "data.train_batch_size", "responses, counted in prompts", _batch),
        ruled(
            "steps_per_generation", "translated", "data.train_batch_size", "micro-batches, counted in prompts", _batch
        ),
        renamed("shuffle_dataset", "data.shuffle", "a new order every epoch"),
        met("log_completions", ROLLOUTS),
        met("num_completions_to_print", ROLLOUTS),
        met("log_unique_prompts", ROLLOUTS),
    ]


def _policy() -> list[Entry]:
    preference = "algorithm.preference"
    return [
        ruled("beta", "translated", f"{A}.kl_loss_coef or {preference}.beta", "0 has no reference", _beta),
        ruled("loss_type", "translated", f"{A}.loss_agg_mode or {preference}.loss_mode", "how tokens add up", _loss),
        renamed("num_iterations", f"{A}.ppo_epochs", "passes over a batch"),
        renamed("epsilon", f"{A}.clip_ratio", "clip range"),
        renamed("epsilon_high", f"{A}.clip_ratio_high", "clip-higher"),
        renamed("delta", f"{A}.clip_ratio_c", "dual clip"),
        ruled("importance_sampling_level", "translated", f"{A}.policy_loss.loss_mode", "sequence is gspo", _level),
        ruled("scale_rewards", "translated", "algorithm.norm_adv_by_std_in_grpo", "by the group's deviation", _scale),
        renamed("mask_truncated_completions", "algorithm.overlong_filtering", "left out of the loss"),
        refused("reward_weights", "reward.parts.LABEL has a name and a weight for each function"),
        refused("reward_funcs", "reward.name=path/to/file.py:function, or reward.parts with a weight each"),
        refused("sync_ref_model", "the reference stays as the policy begins"),
        refused("ref_model_*", "the reference stays as the policy begins"),
        refused("top_entropy_quantile", "all tokens of a response are trained on", nothing=(None, 1, 1.0)),
        met("disable_dropout", "there is no dropout"),
        ruled(
            "num_ppo_epochs",
            "translated",
            f"{A}.ppo_epochs, critic.ppo_epochs",
            "passes over a batch",
            lambda value, _: {f"{A}.ppo_epochs": value, "critic.ppo_epochs": value},
        ),
        met_by("num_mini_batches", (1,), "one", "actor.ppo_mini_batch_size: prompts of an update"),
        renamed("cliprange", f"{A}.clip_ratio", "clip range"),
        renamed("cliprange_value", "critic.cliprange_value", "values"),
        refused("vf_coef", "the critic has an optimizer of its own: critic.optim.lr"),
        renamed("gamma", "algorithm.gamma", "discount"),
        renamed("lam", "algorithm.lam", "GAE"),
        ruled(
            "kl_coef",
            "translated",
            "algorithm.kl_ctrl.kl_coef",
            "subtracted from the reward",
            lambda v, _: {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": v} if v else {},
        ),
        worded("kl_estimator", "algorithm.kl_penalty", {}, "k1 or k3"),
        refused("whiten_rewards", "advantages are whitened, rewards are not"),
        refused("missing_eos_penalty", "reward.overlong_buffer, or finish_reason in a reward of your own"),
        ruled(
            "reward_model_path",
            "translated",
            "reward_model.model.path",
            "reward.name=model has it score",
            lambda value, _: {"reward_model.model.path": value, "reward.name": "model"},
        ),
        renamed("sft_model_path", f"{M}.path", "the policy as it begins"),
        refused("total_episodes", "trainer.total_training_steps or trainer.total_epochs"),
        met("local_rollout_forward_batch_size", "micro-batches are filled up to a number of tokens"),
        met_by("stop_token", ("eos",), "responses end at the end token", "rollout.stop_token_ids"),
        renamed("stop_token_id", f"{R}.stop_token_ids", "stop tokens", lambda value: [value]),
    ]


def _examples() -> list[Entry]:
    length = "tokens of an answer; data.max_prompt_length are those of a prompt"
    return [
        renamed("label_smoothing", "algorithm.preference.label_smoothing", "share of pairs the wrong way round"),
        renamed("rpo_alpha", "algorithm.preference.sft_coef", "the chosen answers' cross-entropy beside it"),
        renamed("desirable_weight", "algorithm.preference.desirable_weight", "KTO"),
        renamed("undesirable_weight", "algorithm.preference.undesirable_weight", "KTO"),
        met("precompute_ref_log_probs", "the reference's are computed step by step"),
        refused("reference_free", "loss_mode=simpo or orpo have no reference"),
        refused("f_divergence_type", "the divergence is the reverse KL", nothing=(None, "reverse_kl")),
        refused("max_length", f"data.max_prompt_length and data.max_response_length: {length}"),
        renamed(
            "truncation_mode", "data.truncation", "which part stays", lambda v: {"keep_end": "left"}.get(v, "right")
        ),
        met("packing", "sequences are always packed, and no token sees another sequence"),
        met("packing_strategy", "sequences are always packed"),
        met("padding_free", "sequences are never padded"),
        met("completion_only_loss", "of a prompt and its answer the answer is learnt"),
        met_by(
            "assistant_only_loss", (True,), "data.messages_key: every turn of the assistant", "prompts are not learnt"
        ),
        refused(
            "dataset_text_field", "rows have a prompt and an answer (data.prompt_key, data.answer_key) or messages"
        ),
        renamed(
            "chat_template_kwargs",
            "data.apply_chat_template_kwargs",
            "what the chat template is told beside the messages",
        ),
        refused("chat_template_path", "the tokenizer's folder holds the chat template"),
        refused("eos_token", "the tokenizer's folder says it"),
        refused("pad_token", "nothing is padded"),
    ]


ENTRIES: tuple[Entry, ...] = (*_training(), *_generation(), *_policy(), *_examples())

"""Fields of TRL's GRPOConfig, RLOOConfig, PPOConfig, SFTConfig, DPOConfig, KTOConfig and RewardConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration import trl_arguments
from megarl.migration.entry import Entry, Made, Settings, met, met_by, refused, renamed, ruled, worded
from megarl.migration.trl_batch import DEFAULTS, batch, batch_sizes
from megarl.migration.trl_trainers import OPTIM, POLICY_LOSSES, TRAINERS, A, trainer_of

__all__ = ["DEFAULTS", "ENTRIES", "complete"]

R, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
ROLLOUTS = "sample rollouts of every step are written to the run folder: trainer.log_rollouts"
NO_SERVER = "there is no server: ranks train and generate"


def complete(settings: Settings, made: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The flow, and what the trainer has by default."""
    name, default = trainer_of(settings), "TRL's default"
    trainer = TRAINERS[name]
    own = "a step of per_device_train_batch_size x gradient_accumulation_steps x num_processes"
    added: dict[str, tuple[Any, str]] = {
        "trainer.flow": (trainer.flow, f"these fields are {name.upper()}'s"),
        **{key: (size, own) for key, size in batch_sizes(settings).items()},
        f"{OPTIM}.lr": (trainer.lr, default),
        f"{OPTIM}.lr_decay_style": ("linear", default),
        f"{OPTIM}.weight_decay": (0.0, default),
        "trainer.total_epochs": (3, default),
        **{key: (value, default) for key, value in trainer.made.items()},
    }
    if name == "ppo":
        added["critic.optim.lr"] = (made.get(f"{OPTIM}.lr", trainer.lr), "TRL has one optimizer for both")
    if name == "grpo" and made.get(f"{A}.use_kl_loss"):
        added[f"{A}.kl_loss_type"] = ("k3+", f"{default}: use_bias_correction_kl")
    if name == "grpo" and settings.of("vllm_importance_sampling_correction") is None:
        added |= {key: (value, default) for key, value in _correction(True, settings).items()}
    return added


def _beta(value: Any, settings: Settings) -> Mapping[str, Any]:
    name = trainer_of(settings)
    if TRAINERS[name].flow in ("preference", "kto"):
        return {"algorithm.preference.beta": value} if value else {}
    if name == "rloo":
        return {"algorithm.use_kl_in_reward": bool(value)} | ({"algorithm.kl_ctrl.kl_coef": value} if value else {})
    return {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": value} if value else {}


def _loss(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    name = trainer_of(settings)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if TRAINERS[name].flow == "preference":
        losses = {"sigmoid": "dpo", "ipo": "ipo", "dpo": "dpo", "simpo": "simpo", "orpo": "orpo"}
        if value not in losses or (name == "cpo" and value != "simpo"):
            return Made(kind="refused", why="megarl algorithms lists the losses on pairs: dpo, ipo, simpo, orpo")
        return {"algorithm.preference.loss_mode": losses[value]}
    if name == "kto" and value == "kto":
        return {}
    if value not in POLICY_LOSSES or value in ("luspo", "vespo"):
        return Made(
            kind="refused", why="megarl algorithms lists the losses; actor.loss_agg_mode says how tokens add up"
        )
    means = {"dr_grpo": "seq-mean-token-sum-norm", "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
    made: dict[str, Any] = {f"{A}.loss_agg_mode": means.get(value, "token-mean")}
    if value in ("cispo", "sapo"):
        made[f"{A}.policy_loss.loss_mode"] = value
    if value == "cispo":
        made[f"{A}.clip_ratio_low"] = 0.9999  # only its largest weight is bounded
    return made


def _clip_high(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if settings.of("loss_type") == "cispo":  # there it is the largest weight
        if not isinstance(value, int | float) or value <= 1:
            return Made(kind="refused", why="with loss_type=cispo it is the largest weight, 5.0 say")
        return {f"{A}.clip_ratio_high": value - 1}
    return {} if value is None else {f"{A}.clip_ratio_high": value}


def _scale(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value not in (True, False, "group", "none"):
        return Made(kind="refused", why="advantages are divided by the group's deviation or by nothing")
    return {"algorithm.norm_adv_by_std_in_grpo": value in (True, "group")}


def _length(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    """TRL counts a prompt and its answer together."""
    if not isinstance(value, int) or value < 2:
        return Made(kind="refused", why="data.max_prompt_length and data.max_response_length: tokens of both")
    prompt, answer = settings.number("max_prompt_length", 0), settings.number("max_completion_length", 0)
    answer = answer or max(1, value - prompt if prompt else value // 2)
    return {"data.max_prompt_length": prompt or max(1, value - answer), "data.max_response_length": answer}


def _level(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.policy_loss.loss_mode": "gspo"} if str(value).startswith("sequence") else {}


def _rewards(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = value if isinstance(value, list) else [value]
    if names == ["accuracy_reward"]:
        return {"reward.name": "math_verify"}
    return Made(kind="refused", why="reward.name=path/to/file.py:function, or reward.parts with a weight each")


def _correction(value: Any, settings: Settings) -> dict[str, Any]:
    """TRL's weights for vLLM's distribution: truncated, or zero outside of bounds, by token or by sequence."""
    if not (value and settings.of("use_vllm")):
        return {}
    mode = str(settings.of("vllm_importance_sampling_mode") or "sequence_mask")
    level = mode.partition("_")[0]
    capped = settings.of("vllm_importance_sampling_cap")
    most = settings.of("vllm_importance_sampling_clip_max") or capped or 3.0
    least = settings.of("vllm_importance_sampling_clip_min")
    made = {f"{CORRECTION}.rollout_is": level, f"{CORRECTION}.rollout_is_threshold": most}
    if mode.endswith("_mask"):
        made |= {
            f"{CORRECTION}.rollout_rs": level,
            f"{CORRECTION}.rollout_rs_threshold": most,
            f"{CORRECTION}.rollout_rs_threshold_lower": least or 1e-9,  # null would be 1 / upper
        }
    return made


def _engine(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{R}.name": "vllm" if value else "native"}


def _part_of_correction(key: str, why: str) -> Entry:
    to = f"{CORRECTION}.*"

    def rule(value: Any, settings: Settings) -> Mapping[str, Any]:
        on = settings.of("vllm_importance_sampling_correction")
        return {} if value is None else _correction(on is None or on, settings)

    return ruled(key, "translated", to, why, rule)


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
            NO_SERVER,
        ),
        met("vllm_server_*", NO_SERVER),
        met("vllm_group_port", NO_SERVER),
        met_by("vllm_model_impl", ("vllm",), "vLLM's own models", "the engine has vLLM's own models"),
        refused("vllm_structured_outputs_regex", "responses are drawn from the policy itself"),
        refused("vllm_guided_decoding_regex", "responses are drawn from the policy itself"),
        refused("use_transformers_continuous_batching", "both engines add and drop sequences at every step"),
        refused("transformers_continuous_batching_config", "rollout.max_num_seqs and max_num_batched_tokens"),
        refused("use_transformers_paged", "both engines have a paged KV cache"),
        renamed("vllm_gpu_memory_utilization", f"{R}.gpu_memory_utilization", "the engine's part"),
        renamed("vllm_tensor_parallel_size", f"{R}.tensor_model_parallel_size", "ranks of a replica"),
        met("vllm_enable_sleep_mode", "the engine gives its memory back between phases: rollout.free_cache_engine"),
        met("vllm_max_model_length", "data.max_prompt_length + data.max_response_length"),
        _part_of_correction("vllm_importance_sampling_correction", weighed),
        _part_of_correction("vllm_importance_sampling_mode", weighed),
        _part_of_correction("vllm_importance_sampling_clip_max", weighed),
        _part_of_correction("vllm_importance_sampling_clip_min", weighed),
        _part_of_correction("vllm_importance_sampling_cap", weighed),
        refused("off_policy_mask_threshold", "rollout_correction.rollout_rs leaves out what is too far off"),
        met("ds3_gather_for_generation", "a reshard moves the weights into the engine's layout"),
        met("cache_implementation", "the KV cache is paged"),
        batch("generation_batch_size", "responses, counted in prompts"),
        batch("steps_per_generation", "micro-batches, counted in prompts"),
        renamed("num_generations_eval", f"{R}.val_kwargs.n", "responses to a held-out prompt"),
        renamed("shuffle_dataset", "data.shuffle", "a new order every epoch"),
        met("log_completions", ROLLOUTS),
        met("num_completions_to_print", ROLLOUTS),
        met("log_unique_prompts", ROLLOUTS),
        met("wandb_log_unique_prompts", ROLLOUTS),
        met("log_multimodal", ROLLOUTS),
        refused("log_completions_hub_repo", ROLLOUTS),
        refused("max_tool_calling_iterations", "environment.* has tools and agents, and their turns"),
    ]


def _policy() -> list[Entry]:
    preference = "algorithm.preference"
    return [
        ruled("beta", "translated", f"{A}.kl_loss_coef or {preference}.beta", "0 has no reference", _beta),
        ruled("loss_type", "translated", f"{A}.loss_agg_mode or {preference}.loss_mode", "how tokens add up", _loss),
        renamed("num_iterations", f"{A}.ppo_epochs", "passes over a batch"),
        renamed("epsilon", f"{A}.clip_ratio", "clip range"),
        ruled("epsilon_high", "translated", f"{A}.clip_ratio_high", "clip-higher; CISPO's largest weight", _clip_high),
        renamed("delta", f"{A}.clip_ratio_c", "dual clip"),
        renamed("sapo_temperature_pos", f"{A}.policy_loss.tau_pos", "SAPO's of positive advantages"),
        renamed("sapo_temperature_neg", f"{A}.policy_loss.tau_neg", "SAPO's of other advantages"),
        refused("vespo_*", "there is no VESPO", nothing=(None, 2, 2.0, 3, 3.0)),
        renamed("entropy_coef", f"{A}.entropy_coeff", "entropy bonus; averaged as loss_agg_mode says"),
        refused("use_adaptive_entropy", "the entropy bonus is constant: actor.entropy_coeff"),
        met("entropy_coef_*", "of use_adaptive_entropy"),
        met("entropy_target", "of use_adaptive_entropy"),
        ruled(
            "use_bias_correction_kl",
            "translated",
            f"{A}.kl_loss_type",
            "the gradient of the reverse KL, or k3's own",
            lambda value, _: {f"{A}.kl_loss_type": "k3+" if value else "k3"},
        ),
        refused("cast_lm_head_to_fp32", "logits have the weights' type, and log-probabilities are summed in fp32"),
        ruled("importance_sampling_level", "translated", f"{A}.policy_loss.loss_mode", "sequence is gspo", _level),
        ruled("scale_rewards", "translated", "algorithm.norm_adv_by_std_in_grpo", "by the group's deviation", _scale),
        renamed("mask_truncated_completions", "algorithm.overlong_filtering", "left out of the loss"),
        refused("reward_weights", "reward.parts.LABEL has a name and a weight for each function"),
        ruled(
            "reward_funcs", "translated", "reward.name", "accuracy_reward is math_verify; others are files", _rewards
        ),
        refused("reward_model_name_or_path", "reward.name=model has reward_model.model.path score"),
        met_by(
            "multi_objective_aggregation",
            ("sum_then_normalize",),
            "reward.parts are summed, then compared within their group",
            "reward.parts are summed, then compared within their group",
        ),
        refused("normalize_advantages", "RLOO's advantages are as they are"),
        refused("normalize_advantage", "RLOO's advantages are as they are"),
        refused("normalize_reward", "rewards are not normalized"),
        refused("token_level_kl", "algorithm.use_kl_in_reward has it token by token, as its sum"),
        refused("reward_clip_range", "rewards are not clipped: bound them in the reward"),
        renamed("rloo_k", f"{R}.n", "responses to a prompt"),
        refused("center_rewards_coefficient", "rewards are not centred", nothing=(None, 0, 0.0)),
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
            lambda v, _: {"algorithm.use_kl_in_reward": bool(v)} | ({"algorithm.kl_ctrl.kl_coef": v} if v else {}),
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
        renamed("sft_model_path", f"{trl_arguments.M}.path", "the policy as it begins"),
        refused("total_episodes", "trainer.total_training_steps or trainer.total_epochs"),
        met("num_sample_generations", ROLLOUTS),
        met("local_rollout_forward_batch_size", "micro-batches are filled up to a number of tokens"),
        met_by("stop_token", ("eos",), "responses end at the end token", "rollout.stop_token_ids"),
        renamed("stop_token_id", f"{R}.stop_token_ids", "stop tokens", lambda value: [value]),
    ]


def _examples() -> list[Entry]:
    both, length = "data.max_prompt_length, data.max_response_length", "half each where only their sum is said"
    return [
        renamed("label_smoothing", "algorithm.preference.label_smoothing", "share of pairs the wrong way round"),
        renamed("rpo_alpha", "algorithm.preference.sft_coef", "the chosen answers' cross-entropy beside it"),
        renamed("desirable_weight", "algorithm.preference.desirable_weight", "KTO"),
        renamed("undesirable_weight", "algorithm.preference.undesirable_weight", "KTO"),
        renamed("simpo_gamma", "algorithm.preference.gamma", "SimPO's margin, as a share of beta", lambda value: value),
        refused("cpo_alpha", "SimPO without CPO's cross-entropy: algorithm.preference.sft_coef adds one"),
        met("precompute_ref_log_probs", "the reference's are computed step by step"),
        met("precompute_ref_batch_size", "the reference's are computed step by step"),
        refused("loss_weights", "one loss on pairs; algorithm.preference.sft_coef adds cross-entropy", nothing=(None,)),
        refused("use_weighting", "pairs weigh the same"),
        refused("ld_alpha", "all tokens of an answer count", nothing=(None, 1, 1.0)),
        met("discopop_tau", "of a loss that is not here"),
        met("f_alpha_divergence_coef", "of a divergence that is not here"),
        refused("generate_during_eval", "megarl generate and megarl eval answer from a checkpoint"),
        refused("reference_free", "loss_mode=simpo or orpo have no reference"),
        refused("f_divergence_type", "the divergence is the reverse KL", nothing=(None, "reverse_kl")),
        ruled("max_length", "translated", both, length, _length),
        renamed(
            "truncation_mode", "data.truncation", "which part stays", lambda v: {"keep_end": "left"}.get(v, "right")
        ),
        met("packing", "sequences are always packed, and no token sees another sequence"),
        met("packing_strategy", "sequences are always packed"),
        met("padding_free", "sequences are never padded"),
        met("eval_packing", "sequences are always packed"),
        met("padding_value", "sequences are never padded"),
        met("label_pad_token_id", "sequences are never padded"),
        refused("dataset_kwargs", "rows are prepared as data.* says", nothing=(None, {})),
        ruled("max_seq_length", "translated", both, length, _length),
        refused("is_encoder_decoder", "models are decoders"),
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


ENTRIES: tuple[Entry, ...] = (*trl_arguments.ENTRIES, *_generation(), *_policy(), *_examples())

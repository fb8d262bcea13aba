"""verl's keys of the policy and its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.migration.entry import (
    Entry,
    Made,
    Settings,
    carried,
    met,
    met_by,
    part_of,
    refused,
    renamed,
    ruled,
    worded,
)
from megarl.migration.verl import A, F, budget, experts_over, layout, updates
from megarl.migration.verl_transformer import overridden

M = "actor_rollout_ref.model"
OVERRIDES = "actor_rollout_ref.actor.megatron.override_transformer_config"

PACKED = "sequences are always packed, never padded"
LORA = (
    "there are no adapters: all weights are trained; spread them with "
    "actor.megatron.tensor_model_parallel_size, pipeline_model_parallel_size and the offload keys"
)
FSDP = (
    "there is no FSDP: ranks hold parts of the model by actor.megatron.tensor_model_parallel_size and "
    "pipeline_model_parallel_size, and parts of the optimizer's state by use_distributed_optimizer"
)
ONE_BUDGET = (
    "log-probabilities are computed in micro-batches of actor.ppo_max_token_len_per_gpu tokens, all models' alike"
)
AS_ACTOR = "the reference has the actor's layout"
CHUNKED = "log-probabilities and entropy are computed in chunks of the vocabulary's logits, which are never held whole"
REMOTE = "no code of a model's folder is run; the families of megarl/models/families load without"
SPREAD = (
    "its ranks become tensor-parallel ones, with sequence parallelism: as many share a sequence's activations, "
    "and there are as many data-parallel ranks"
)
EXPERTS = "experts are spread over the tensor-parallel ranks, which become as many, up to a node's GPUs"
PROFILER = "profiles are of the whole run: profiler.tool, profiler.steps and profiler.ranks"
NPU = "profiles of NPUs are not taken"
REMOVED = (
    "there is no router replay: the router computes in float32, and actor_rollout_ref.rollout.max_logp_gap "
    "watches the gap"
)
FROM_HF = "every rank reads its slices of model.path's safetensors files itself; no converted copy is needed"


def _spread(model: str) -> Callable[[Any, Settings], Made | Mapping[str, Any]]:
    def rule(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
        if isinstance(value, int) and value > 1:
            return layout(settings, model)
        return Made(kind="translated", why="asks for nothing")

    return rule


def _warmup(own: str) -> Callable[[Any, Settings], Made]:
    def rule(value: Any, settings: Settings) -> Made:
        if value is None or value == -1:
            return Made(kind="translated", why="asks for nothing")
        each = updates(settings, own.removesuffix(".optim"))
        steps = {f"{own}.lr_warmup_steps": value * each}
        if each == 1:
            return Made(kind="carried", values=steps)
        why = f"verl's schedule goes on once per training step, here with each of its {each} optimizer steps"
        return Made(kind="translated", values=steps, why=why)

    return rule


def _tensor_parallel(model: str) -> Callable[[Any, Settings], Made]:
    def rule(value: Any, settings: Settings) -> Made:
        key = f"{model}.megatron.tensor_model_parallel_size"
        made = layout(settings, model)
        if value is None or made[key] == value:
            return Made(kind="carried", values={} if value is None else {key: value})
        return Made(kind="translated", values=made, why="with the ranks of context, Ulysses or expert parallelism")

    return rule


def _experts(model: str) -> Callable[[Any, Settings], Made | Mapping[str, Any]]:
    def rule(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
        most = settings.number("trainer.n_gpus_per_node")
        if experts_over(settings, model) <= 1:
            return Made(kind="translated", why="experts are spread over the tensor-parallel ranks")
        if experts_over(settings, model) > most:
            why = f"experts are spread over tensor-parallel ranks, of which a node has {most}; use pipeline stages too"
            return Made(kind="refused", why=why)
        return layout(settings, model)

    return rule


def _tokens(model: str) -> Callable[[Any, Settings], Mapping[str, Any]]:
    return lambda value, settings: {f"{model}.ppo_max_token_len_per_gpu": budget(settings, model)}


def _prefetch(value: Any, settings: Settings) -> Mapping[str, Any]:
    own = f"{A}.megatron"
    return {f"{own}.overlap_grad_reduce": True, f"{own}.overlap_param_gather": True} if value else {}


def _dtype(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "bfloat16", "float32": "bfloat16", None: None}
    if value not in names:
        return Made(
            kind="refused", why="weights are bfloat16 or float32: float16 needs loss scaling, which is not here"
        )
    return {f"{M}.dtype": names[value]} if value else {}


def batching(model: str) -> list[Entry]:
    """Keys of micro-batches, which become a budget of tokens."""
    why = "micro-batches are filled up to a number of tokens: as many as so many whole sequences"
    to = f"{model}.ppo_max_token_len_per_gpu"
    return [
        ruled(f"{model}.ppo_micro_batch_size_per_gpu", "translated", to, why, _tokens(model)),
        ruled(f"{model}.ppo_micro_batch_size", "translated", to, why, _tokens(model)),
        ruled(to, "carried", to, "times the ranks that share a sequence", _tokens(model)),
        met(f"{model}.use_dynamic_bsz", "micro-batches are filled up to a number of tokens"),
        met(f"{model}.rollout_n", "actor_rollout_ref.rollout.n"),
        met(f"{model}.forward_max_token_len_per_gpu", ONE_BUDGET),
        met(f"{model}.forward_micro_batch_size_per_gpu", ONE_BUDGET),
        met(f"{model}.forward_micro_batch_size", ONE_BUDGET),
    ]


def optimizer(model: str) -> list[Entry]:
    """Keys of a model's optimizer and learning rate."""
    own = f"{model}.optim"
    cpu = "steps are taken on the GPU; megatron.optimizer_offload has its state on the host during generation"
    return [
        *carried(f"{own}.lr", f"{own}.weight_decay", f"{own}.clip_grad", f"{own}.min_lr", f"{own}.lr_decay_style"),
        ruled(f"{own}.lr_warmup_steps", "carried", f"{own}.lr_warmup_steps", "-1 is none", _warmup(own)),
        *carried(f"{own}.lr_warmup_steps_ratio"),
        renamed(f"{model}.grad_clip", f"{own}.clip_grad", "the norm is clipped by the optimizer"),
        worded(f"{own}.warmup_style", f"{own}.lr_decay_style", {"linear": "linear"}, "after the warm-up"),
        worded(f"{own}.lr_scheduler_type", f"{own}.lr_decay_style", {}, "after the warm-up"),
        ruled(f"{own}.betas", "translated", f"{own}.adam_beta1, adam_beta2", "two keys", _betas(own)),
        met(f"{own}.total_training_steps", "the schedule ends with the run"),
        met_by(f"{own}.optimizer", ("AdamW", "adam", "Adam", "adamw"), "always AdamW", "the optimizer is AdamW"),
        met_by(f"{own}.optimizer_impl", ("torch.optim",), "Megatron-Core's AdamW", "the optimizer is Megatron-Core's"),
        met(f"{own}.muon_*", "of the optimizer muon, which is not here"),
        refused(f"{own}.override_optimizer_config.*", cpu),
        refused(f"{own}.*", "the schedule is lr_warmup_steps or lr_warmup_steps_ratio, lr_decay_style and min_lr"),
    ]


def _betas(own: str) -> Callable[[Any, Settings], Mapping[str, Any]]:
    return lambda value, settings: {f"{own}.adam_beta1": value[0], f"{own}.adam_beta2": value[1]} if value else {}


def fsdp(section: str, megatron: str, *, frozen: bool) -> list[Entry]:
    """Keys of FSDP, of which the memory is Megatron's.

    Args:
        section: "actor_rollout_ref.actor.fsdp_config".
        megatron: "actor_rollout_ref.actor.megatron", where the offload keys are.
        frozen: whether the model has no optimizer.
    """
    entries = [
        renamed(f"{section}.param_offload", f"{megatron}.param_offload", "the weights leave the GPU while not needed"),
        met_by(f"{section}.fsdp_size", (-1,), "use_distributed_optimizer shards over all data-parallel ranks", FSDP),
        met(f"{section}.mixed_precision.*", "bfloat16 weights, float32 gradients, master weights and buffers"),
        ruled(f"{section}.model_dtype", "translated", f"{M}.dtype", "master weights are float32 anyway", _dtype),
        met(f"{section}.reshard_after_forward", "weights stay with their ranks"),
        refused(f"{section}.strategy", FSDP),
        refused(f"{section}.use_orig_params", FSDP),
    ]
    if frozen:
        met_always = "its weights are whole on the ranks of a replica: there is nothing to fetch"
        return [*entries, met(f"{section}.forward_prefetch", met_always), refused(f"{section}.*", FSDP)]
    offload = f"{megatron}.optimizer_offload"
    return [
        *entries,
        renamed(f"{section}.optimizer_offload", offload, "the optimizer's state waits on the host while not needed"),
        ruled(
            f"{section}.forward_prefetch",
            "translated",
            f"{megatron}.overlap_param_gather",
            "updated parameters are fetched while the forward pass runs",
            _prefetch,
        ),
        refused(f"{section}.*", FSDP),
    ]


def sharded(model: str) -> list[Entry]:
    """Keys of a model's Megatron layout."""
    own = f"{model}.megatron"
    return [
        ruled(
            f"{own}.tensor_model_parallel_size",
            "carried",
            f"{own}.tensor_model_parallel_size",
            "",
            _tensor_parallel(model),
        ),
        *carried(f"{own}.pipeline_model_parallel_size", f"{own}.virtual_pipeline_model_parallel_size"),
        *carried(f"{own}.sequence_parallel", f"{own}.use_distributed_optimizer"),
        *carried(f"{own}.param_offload", f"{own}.grad_offload", f"{own}.optimizer_offload"),
        ruled(
            f"{own}.context_parallel_size", "translated", f"{own}.tensor_model_parallel_size", SPREAD, _spread(model)
        ),
        ruled(
            f"{model}.ulysses_sequence_parallel_size",
            "translated",
            f"{own}.tensor_model_parallel_size",
            SPREAD,
            _spread(model),
        ),
        ruled(
            f"{own}.expert_model_parallel_size",
            "translated",
            f"{own}.tensor_model_parallel_size",
            EXPERTS,
            _experts(model),
        ),
        ruled(
            f"{own}.expert_tensor_parallel_size",
            "translated",
            f"{own}.tensor_model_parallel_size",
            EXPERTS,
            _experts(model),
        ),
        met(f"{own}.use_mbridge", "Hugging Face folders are always read and written directly"),
        met(f"{own}.vanilla_mbridge", "Hugging Face folders are always read and written directly"),
        met(f"{own}.use_dist_checkpointing", FROM_HF),
        met(f"{own}.dist_checkpointing_path", FROM_HF),
        met(f"{own}.dist_checkpointing_prefix", FROM_HF),
        met_by(f"{own}.dtype", ("bfloat16", "bf16"), "model.dtype", "set actor_rollout_ref.model.dtype"),
        renamed(f"{own}.seed", "data.seed", "one seed for data order, weights and sampling"),
        refused(
            f"{own}.override_ddp_config.*",
            "gradients are reduced with overlap_grad_reduce and use_distributed_optimizer",
        ),
        refused(
            f"{own}.override_mcore_model_config.*", "fields of the TransformerConfig are override_transformer_config"
        ),
        refused(f"{own}.lora_type", LORA),
    ]


def profiles(model: str) -> list[Entry]:
    """Keys of a role's profiler."""

    def enable(value: Any, settings: Settings) -> Mapping[str, Any]:
        return {"profiler.tool": "torch"} if value else {}

    def ranks(value: Any, settings: Settings) -> Mapping[str, Any]:
        profiled = settings.of(f"{model}.profiler.enable") and not settings.of(f"{model}.profiler.all_ranks")
        return {"profiler.ranks": value} if profiled and value else {}

    def all_ranks(value: Any, settings: Settings) -> Mapping[str, Any]:
        return {"profiler.ranks": "all"} if value and settings.of(f"{model}.profiler.enable") else {}

    return [
        ruled(f"{model}.profiler.enable", "translated", "profiler.tool", f"{PROFILER}; name the steps", enable),
        ruled(f"{model}.profiler.ranks", "translated", "profiler.ranks", PROFILER, ranks),
        ruled(f"{model}.profiler.all_ranks", "translated", "profiler.ranks", PROFILER, all_ranks),
        refused(f"{model}.profiler.tool_config.npu.*", f"{NPU}; {PROFILER}"),
        refused(f"{model}.profiler.*", PROFILER),
    ]


def adapters(model: str) -> list[Entry]:
    """Keys of a model's adapters."""
    switches = [f"{model}.{name}" for name in ("lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path")]
    parts = ("lora_*", "lora.*", "target_modules", "exclude_modules")
    return [
        *(refused(switch, LORA) for switch in switches),
        *(part_of(f"{model}.{part}", switches, LORA) for part in parts),
    ]


def _model() -> list[Entry]:
    return [
        *carried(f"{M}.path", f"{M}.tokenizer_path", f"{M}.enable_gradient_checkpointing"),
        met_by(f"{M}.use_remove_padding", (True, False), PACKED, PACKED),
        met(f"{M}.use_fused_kernels", CHUNKED),
        met(f"{M}.fused_kernel_options.*", CHUNKED),
        met(f"{M}.use_shm", FROM_HF),
        met(f"{M}.hybrid_engine", "always"),
        ruled(f"{M}.torch_dtype", "translated", f"{M}.dtype", "weights' type", _dtype),
        refused(f"{M}.trust_remote_code", REMOTE),
        refused(f"{M}.external_lib", "extensions are files that keys name: path/to/file.py:function"),
        refused(f"{M}.enable_activation_offload", "activations are recomputed instead: enable_gradient_checkpointing"),
        *adapters(M),
        refused(f"{M}.mtp.*", "further-token prediction is not trained: the model's main head is"),
        refused(f"{M}.override_config.*", "a model is what its folder's config.json says; change the field there"),
        met(f"{M}.use_liger", CHUNKED),
        refused(f"{M}.custom_chat_template", "the tokenizer's folder holds the chat template; change it there"),
    ]


def _actor() -> list[Entry]:
    names = ("tau_pos", "tau_neg", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    modes = {"gpg": "reinforce", "clip-cov": "clip_cov", "kl-cov": "kl_cov", "dppo_tv": None, "dppo_kl": None}
    return [
        *carried(f"{A}.ppo_mini_batch_size", f"{A}.ppo_epochs", f"{A}.clip_ratio", f"{A}.clip_ratio_low"),
        *carried(f"{A}.clip_ratio_high", f"{A}.clip_ratio_c", f"{A}.loss_agg_mode", f"{A}.entropy_coeff"),
        *carried(f"{A}.use_kl_loss", f"{A}.kl_loss_coef", *(f"{A}.policy_loss.{name}" for name in names)),
        worded(f"{A}.policy_loss.loss_mode", f"{A}.policy_loss.loss_mode", modes, "megarl algorithms lists the names"),
        ruled(
            f"{A}.use_gpg_loss",
            "translated",
            f"{A}.policy_loss.loss_mode",
            "GPG's loss has no ratio: reinforce",
            lambda value, _: {f"{A}.policy_loss.loss_mode": "reinforce"} if value else {},
        ),
        renamed(f"{A}.tau_pos", f"{A}.policy_loss.tau_pos", "SAPO's"),
        renamed(f"{A}.tau_neg", f"{A}.policy_loss.tau_neg", "SAPO's"),
        *batching(A),
        *optimizer(A),
        *sharded(A),
        *overridden(OVERRIDES),
        *fsdp(f"{A}.fsdp_config", f"{A}.megatron", frozen=False),
        *profiles(A),
        met_by(f"{A}.strategy", ("megatron",), "always Megatron", FSDP),
        met_by(
            f"{A}.use_torch_compile", (False,), "nothing of the loss is compiled", "the loss is chunked, not compiled"
        ),
        met(f"{A}.entropy_from_logits_with_chunking", CHUNKED),
        met(f"{A}.entropy_checkpointing", CHUNKED),
        met(f"{A}.shuffle", "mini-batches are of a step's prompts in the order they were drawn"),
        met(f"{A}.data_loader_seed", "data.seed"),
        met(f"{A}.load_weight", "weights are always those of model.path; model.random_init starts without"),
        met(f"{A}.calculate_entropy", "the entropy is always among the metrics"),
        refused(f"{A}.freeze_vision_tower", "models are language models: there is no vision tower"),
        refused(f"{A}.router_replay.*", REMOVED, nothing=(None, False, "disabled")),
        refused(f"{A}.use_prefix_grouper", "the prompt of each response is computed with it"),
        refused(f"{A}.calculate_sum_pi_squared", "that estimator of the baseline is not here; use rloo or opo"),
    ]


def _reference() -> list[Entry]:
    to = f"{F}.megatron.param_offload"
    layouts = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
    return [
        *carried(to),
        *(met(f"{F}.megatron.{name}_parallel_size", AS_ACTOR) for name in layouts),
        met(f"{F}.megatron.use_dist_checkpointing", FROM_HF),
        met(f"{F}.megatron.dist_checkpointing_path", FROM_HF),
        met(f"{F}.megatron.*", AS_ACTOR),
        met(f"{F}.ulysses_sequence_parallel_size", AS_ACTOR),
        met(f"{F}.rollout_n", "actor_rollout_ref.rollout.n"),
        *(met(f"{F}.log_prob_{name}", ONE_BUDGET) for name in ("micro_batch_size", "micro_batch_size_per_gpu")),
        *(met(f"{F}.log_prob_{name}", ONE_BUDGET) for name in ("max_token_len_per_gpu", "use_dynamic_bsz")),
        *fsdp(f"{F}.fsdp_config", f"{F}.megatron", frozen=True),
        *profiles(F),
        met_by(f"{F}.strategy", ("megatron",), "always Megatron", FSDP),
        met_by(
            f"{F}.use_torch_compile",
            (False,),
            "nothing of it is compiled",
            "log-probabilities are chunked, not compiled",
        ),
        met(f"{F}.entropy_from_logits_with_chunking", CHUNKED),
        met(f"{F}.entropy_checkpointing", CHUNKED),
        refused(f"{F}.model.*", "the reference is the policy as it begins"),
        refused(
            "actor_rollout_ref.distillation.*",
            "algorithm.adv_estimator=on_policy_distillation learns from teacher.model.path",
        ),
        refused(f"{F}.router_replay.*", REMOVED, nothing=(None, False, "disabled")),
    ]


ENTRIES: tuple[Entry, ...] = (*_model(), *_actor(), *_reference())

"""What becomes of OpenRLHF's options of models, memory, ranks and batches, by the names of `openrlhf_names`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import (
    Entry,
    Made,
    Settings,
    derived,
    met,
    met_by,
    part_of,
    refused,
    renamed,
    ruled,
    switch,
)
from megarl.migration.openrlhf import FLOWS, A, M, R, batches, budget, lengths, trainer_of
from megarl.migration.openrlhf_names import TRAINER

OFFLOAD = f"{A}.megatron.optimizer_offload"
SPREAD = "actor.megatron.tensor_model_parallel_size and pipeline_model_parallel_size spread the weights"
LORA = f"there are no adapters: all weights are trained; {SPREAD}"
SAME_RANKS = "all models are on the same ranks, and leave the GPU between their phases: there is no Ray"
IN_TURN = "steps are one after the other; rollout.carry_over goes on with unfinished responses in the next one"
FUNCTION = (
    "reward.name=path/to/file.py:function, called as function(response, row); a server is asked in such a function"
)
IMAGES = "images are not read: models are language models; use rows of text"
EMA = "no average of the weights is kept; trainer.best_metric keeps the step with the best validation"


def _frozen(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value == settings.of("actor.model_name_or_path"):
        return Made(kind="translated", why="the reference is the policy as it begins")
    return Made(kind="refused", why="the reference is the policy as it begins: set actor_rollout_ref.model.path to it")


def _dtype(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value in ("bf16", "bfloat16", True):
        return {f"{M}.dtype": "bfloat16"}
    return Made(kind="refused", why="weights are bfloat16 or float32: float16 needs loss scaling, which is not here")


def _tensor_parallel(settings: Settings) -> Mapping[str, Any]:
    ranks = settings.number("ds.tensor_parallel_size") * settings.number("ds.ring_attn_size")
    own = f"{A}.megatron"
    return {f"{own}.tensor_model_parallel_size": ranks, f"{own}.sequence_parallel": ranks > 1}


def _epochs(value: Any, settings: Settings) -> Mapping[str, Any]:
    if trainer_of(settings) != "ppo":
        return {"trainer.total_epochs": value}
    critic = {"critic.ppo_epochs": value} if settings.of("algo.advantage.estimator") == "gae" else {}
    return {f"{A}.ppo_epochs": value} | critic


def _engines(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{R}.name": "native" if value == 0 else "vllm"}


def _asleep(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.megatron.param_offload": True, OFFLOAD: True} if value else {}


def _generated(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value and settings.of("algo.dynamic_filtering_enable"):
        return {"data.gen_batch_size": value}
    return Made(kind="translated", why="the engine takes all prompts of a step, as many at a time as fit")


def _models() -> list[Entry]:
    head = "actor_rollout_ref.ref.megatron.param_offload"
    return [
        ruled(TRAINER, "translated", "trainer.flow", "the flow", lambda _, s: {"trainer.flow": FLOWS[trainer_of(s)]}),
        renamed("actor.model_name_or_path", f"{M}.path", "a local Hugging Face folder"),
        renamed("critic.model_name_or_path", "critic.model.path", "a local Hugging Face folder"),
        ruled("ref.model_name_or_path", "refused", "", "the reference is the policy as it begins", _frozen),
        ruled(
            "reward.model_name_or_path",
            "translated",
            "reward_model.model.path",
            "reward.name=model has it score",
            lambda value, _: {"reward.name": "model", "reward_model.model.path": value} if value else {},
        ),
        refused("reward.remote_url", FUNCTION),
        refused("train.agent_func_path", "environment.agent=path/to/file.py:function, or environment.name"),
        switch("ref.offload", head, "the weights leave the GPU while not needed"),
        switch("reward.offload", "reward_model.megatron.param_offload", "the weights leave the GPU while not needed"),
        switch("actor.gradient_checkpointing_enable", f"{M}.enable_gradient_checkpointing", "layers are recomputed"),
        met("actor.gradient_checkpointing_reentrant", "layers are recomputed one by one"),
        refused("actor.aux_loss_coef", "experts have no balancing loss: it would change what is trained for"),
        refused("actor.freeze_visual_encoder", IMAGES),
        refused("critic.save_value_network", "a checkpoint holds all models"),
        renamed("critic.freezing_steps", "trainer.critic_warmup", "steps of the critic alone", lambda n: max(0, n)),
        met_by("ds.value_head_prefix", ("score",), "a head named score", "a head must be named score in the files"),
    ]


def _backend() -> list[Entry]:
    zero = f"there is no DeepSpeed: {SPREAD}"
    split = "the optimizer's state is split over data-parallel ranks: actor.megatron.use_distributed_optimizer"
    shared = f"{A}.megatron.tensor_model_parallel_size"
    ranks = "ranks that share a sequence or a matrix are tensor-parallel ones"
    return [
        met_by("ds.zero_stage", (0, 1, 2), split, zero),
        ruled("ds.param_dtype", "translated", f"{M}.dtype", "weights' type", _dtype),
        ruled("ds.bf16", "translated", f"{M}.dtype", "weights' type", lambda v, s: _dtype(v, s) if v else {}),
        refused("ds.adam_offload", f"steps are taken on the GPU; {OFFLOAD} has the state on the host meanwhile"),
        ruled("ds.enable_sleep", "translated", f"{A}.megatron.*_offload", "while the engine generates", _asleep),
        derived("ds.tensor_parallel_size", shared, ranks, _tensor_parallel),
        derived("ds.ring_attn_size", shared, ranks, _tensor_parallel),
        met("ds.ring_attn_head_stride", "sequences are shared by tensor-parallel ranks"),
        switch(
            "ds.overlap_comm", f"{A}.megatron.overlap_grad_reduce", "gradients are reduced during the backward pass"
        ),
        met("ds.packing_samples", "sequences are always packed, never padded"),
        met("ds.attn_implementation", "the program chooses the attention kernels"),
        met("ds.experts_implementation", "the program chooses the kernels"),
        met("ds.use_liger_kernel", "the vocabulary's logits are never held whole"),
        met_by("ds.grad_accum_dtype", ("fp32",), "gradients are summed in float32", "gradients are summed in float32"),
        met_by("backend", ("fsdp2", "deepspeed"), "always Megatron", "there is no other backend than Megatron"),
        refused("ds.lora.rank", LORA),
        part_of("ds.lora.*", ["ds.lora.rank"], LORA),
        part_of("use_lora_disable", ["ds.lora.rank"], LORA),
        refused("ds.load_in_4bit", "weights are not quantized"),
        refused("ds.use_universal_ckpt", "a checkpoint is read in any layout as it is"),
        refused("ds.zpg", f"there is no ZeRO++: {SPREAD}", nothing=(None, 1)),
        refused("ds.*", zero),
        met("actor_init_on_gpu", "every rank reads its slices of the weights itself"),
        refused("inference_tp_size", "rollout.tensor_model_parallel_size", nothing=(None, 1)),
        refused("load_model", "actor_rollout_ref.model.path is a Hugging Face folder"),
        met("local_rank", "torchrun's"),
        refused("use_ms", "files are read from disk or s3://"),
    ]


def _placement() -> list[Entry]:
    return [
        renamed("num_gpus", "trainer.n_gpus_per_node", "ranks"),
        renamed("actor.num_nodes", "trainer.nnodes", "machines"),
        renamed("actor.num_gpus_per_node", "trainer.n_gpus_per_node", "ranks of a machine"),
        *(met(f"{model}.num_nodes", SAME_RANKS) for model in ("ref", "reward", "critic")),
        *(met(f"{model}.num_gpus_per_node", SAME_RANKS) for model in ("ref", "reward", "critic")),
        met("train.colocate_*", SAME_RANKS),
        ruled("vllm.num_engines", "translated", f"{R}.name", "as many replicas as the ranks make", _engines),
        renamed("vllm.tensor_parallel_size", f"{R}.tensor_model_parallel_size", "ranks of a replica"),
        renamed("vllm.gpu_memory_utilization", f"{R}.gpu_memory_utilization", "the engine's part"),
        renamed("vllm.enforce_eager", f"{R}.enforce_eager", "no graphs"),
        met("vllm.enable_prefix_caching", "prompts that share a beginning share its cache"),
        met("vllm.enable_sleep", "the engine gives its memory back between phases: rollout.free_cache_engine"),
        met("vllm.sync_*", "a reshard moves the weights into the engine's layout"),
        refused("train.async_enable", IN_TURN),
        part_of("train.async_queue_size", ["train.async_enable"], IN_TURN),
        refused("train.partial_rollout_enable", IN_TURN),
    ]


def _batches() -> list[Entry]:
    sizes, tokens = "data.train_batch_size", f"{A}.ppo_max_token_len_per_gpu"
    rows = "prompts of a step and of an update, or rows"
    filled = "micro-batches are filled up to a number of tokens"
    length = "tokens of a prompt and of an answer: half each where only their sum is said"
    both = "data.max_prompt_length, data.max_response_length"

    def budgets(settings: Settings) -> Mapping[str, Any]:
        return {tokens: budget(settings)}

    return [
        derived("train.batch_size", sizes, rows, batches),
        derived("rollout.batch_size", sizes, rows, batches),
        derived("rollout.n_samples_per_prompt", f"{R}.n", "responses to a prompt", batches),
        ruled("rollout.vllm_generate_batch_size", "translated", "data.gen_batch_size", "prompts of a draw", _generated),
        derived("train.micro_batch_size", tokens, filled, budgets),
        derived("train.max_tokens_per_gpu", tokens, filled, budgets),
        derived("train.dynamic_batch_enable", tokens, filled, budgets),
        met("rollout.micro_batch_size", "log-probabilities are computed in actor.ppo_max_token_len_per_gpu tokens"),
        met("rollout.max_tokens_per_gpu", "log-probabilities are computed in actor.ppo_max_token_len_per_gpu tokens"),
        derived("data.max_len", both, length, lengths),
        derived("data.prompt_max_len", both, length, lengths),
        derived("rollout.max_new_tokens", both, length, lengths),
        renamed("rollout.temperature", f"{R}.temperature", "sampling"),
        renamed("rollout.top_p", f"{R}.top_p", "nucleus sampling"),
        ruled("train.max_epochs", "translated", f"{A}.ppo_epochs", "passes over a step, or over the rows", _epochs),
        renamed("train.num_episodes", "trainer.total_epochs", "passes over the prompts"),
        renamed("train.seed", "data.seed", "data order, weights and sampling"),
        switch("train.full_determinism_enable", "trainer.deterministic", "the same bits again"),
        refused("train.enable_ema", EMA),
        part_of("train.ema_beta", ["train.enable_ema"], EMA),
    ]


ENTRIES: tuple[Entry, ...] = (*_models(), *_backend(), *_placement(), *_batches())

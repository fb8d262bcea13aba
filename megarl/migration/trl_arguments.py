"""What all of TRL's trainers take: transformers' TrainingArguments, ModelConfig, ScriptArguments, accelerate's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Entry, Made, Settings, met, met_by, refused, renamed, ruled
from megarl.migration.trl_batch import batch, steps
from megarl.migration.trl_trainers import COMMAND_LINE, OPTIM, TRAINER, TRAINERS, trainer_of

M = "actor_rollout_ref.model"
LORA = "there are no adapters: all weights are trained, spread by actor.megatron.tensor_model_parallel_size"
BACKEND = (
    "there is no DeepSpeed and no FSDP: actor.megatron.tensor_model_parallel_size and "
    "pipeline_model_parallel_size spread the model, use_distributed_optimizer the optimizer's state"
)
REMOTE = "no code of a model's folder is run; the families of megarl/models/families load without"
FILES = "rows are files: data.train_files=[x.jsonl] or parquet, also globs and s3:// URIs"
HUB = "checkpoint.save_hf=true writes a Hugging Face folder with each checkpoint"
BEST = "trainer.best_metric=val/accuracy, say, keeps the step with the best validation"


def _trainer(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    name = trainer_of(settings)
    flow = {"trainer.flow": TRAINERS[name].flow}
    if name == "cpo" and settings.of("loss_type") != "simpo":
        why = "CPO's loss of pairs without a reference: algorithm.preference.loss_mode=simpo or orpo are such losses"
        return Made(kind="refused", values=flow, why=why)
    return flow


def _model(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if settings.of("sft_model_path"):
        return Made(kind="translated", why="its tokenizer; the policy is sft_model_path")
    return {} if value is None else {f"{M}.path": value}


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
    names = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    style = names.get(value, value)
    if style not in ("constant", "linear", "cosine"):
        return Made(kind="refused", why="lr_decay_style is constant, linear or cosine; min_lr is where it ends")
    return {f"{OPTIM}.lr_decay_style": style, **_lowest(settings)}


def _lowest(settings: Settings) -> dict[str, Any]:
    """Where the decay ends: a learning rate, or a share of it."""
    given = settings.of("lr_scheduler_kwargs")
    if settings.of("lr_scheduler_type") != "cosine_with_min_lr" or not isinstance(given, Mapping):
        return {}
    lr = settings.of("learning_rate") or TRAINERS[trainer_of(settings)].lr
    lowest = given.get("min_lr", lr * given["min_lr_rate"] if "min_lr_rate" in given else None)
    return {} if lowest is None else {f"{OPTIM}.min_lr": lowest}


def _schedule_arguments(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    made = _lowest(settings)
    return made if made or not value else Made(kind="refused", why="lr_decay_style and min_lr")


def _warm_up(value: Any, settings: Settings) -> Mapping[str, Any]:
    if isinstance(value, float) and 0 < value < 1:  # transformers 5 has no warmup_ratio
        return {f"{OPTIM}.lr_warmup_steps_ratio": value}
    return {f"{OPTIM}.lr_warmup_steps": value} if value else {}


def _dtype(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value not in ("bfloat16", "float32", None, "auto"):
        return Made(kind="refused", why="weights are bfloat16 or float32")
    return {f"{M}.dtype": value} if value in ("bfloat16", "float32") else {}


def _processes(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    nodes = settings.number("num_machines")
    if not isinstance(value, int) or value % nodes:
        return Made(kind="refused", why=f"{value} processes do not divide over {nodes} machines")
    return {"trainer.n_gpus_per_node": value // nodes}


def _started() -> list[Entry]:
    """The trainer, and on how many processes."""
    return [
        ruled(TRAINER, "translated", "trainer.flow", "the flow, with the trainer's defaults", _trainer),
        refused(COMMAND_LINE, "the file takes settings as options: name them behind it, --learning_rate 1e-6, say"),
        ruled("num_processes", "translated", "trainer.n_gpus_per_node", "of all machines; here of one", _processes),
        renamed("num_machines", "trainer.nnodes", "nodes"),
        refused(
            "accelerate_config", "of accelerate's file give num_processes and num_machines; the layout is megatron's"
        ),
    ]


def _model_and_rows() -> list[Entry]:
    return [
        ruled("model_name_or_path", "translated", f"{M}.path", "a local Hugging Face folder", _model),
        refused("model_revision", "model.path is a local folder", nothing=(None, "main")),
        refused("model_init_kwargs", "model.path and model.dtype say what is loaded", nothing=(None, {})),
        ruled("dtype", "translated", f"{M}.dtype", "weights' type", _dtype),
        ruled("torch_dtype", "translated", f"{M}.dtype", "weights' type", _dtype),
        met("attn_implementation", "the program chooses the attention kernels"),
        refused("use_peft", LORA),
        refused("peft_config", LORA, nothing=(None,)),
        refused("lora_*", LORA, nothing=(None,)),
        refused("use_rslora", LORA),
        refused("use_dora", LORA),
        refused("load_in_*", "weights are not quantized"),
        refused("bnb_*", "weights are not quantized", nothing=(None, "nf4")),
        refused("use_bnb_*", "weights are not quantized"),
        refused("trust_remote_code", REMOTE),
        ruled("dataset_name", "translated", "data.train_files", FILES, _dataset),
        refused("datasets", FILES),
        refused("dataset_config", FILES),
        refused("dataset_streaming", "rows lie on disk, and are read as they are needed"),
        refused("dataset_train_split", FILES, nothing=(None, "train")),
        refused("dataset_test_split", "held-out rows are data.val_files", nothing=(None, "test")),
        met("remove_unused_columns", "rewards, environments and agents always have the whole row"),
        met("dataset_num_proc", "rows are looked at by all cores"),
        met("dataloader_*", "rows lie mapped on disk"),
        met("pad_to_multiple_of", "sequences are packed, not padded"),
    ]


def _of_calls() -> list[Entry]:
    """What a Python file tells a trainer beside its configuration."""
    tools = "environment.name=path/to/file.py:class has tools; environment.agent=path/to/file.py:function plays on"
    source = "data.source=path/to/file.py:function gives rows of your own"
    own = "its own, of its folder"
    return [
        refused("tools", tools),
        refused("environment_factory", tools),
        refused("rollout_func", tools),
        refused("eval_dataset", "held-out rows are files: data.val_files=[x.jsonl] or parquet"),
        met("train_dataset", f"rows are data.train_files; {source}"),
        refused("formatting_func", source),
        met("data_collator", "sequences are packed, not padded"),
        met("processing_class", f"the tokenizer is {own}"),
        met("tokenizer", f"the tokenizer is {own}"),
        met("reward_processing_classes", f"a reward model's tokenizer is {own}"),
        refused("reward_model", "reward.name=model has reward_model.model.path score"),
        refused("value_model", "critic.model.path; without it the critic begins as the policy"),
        refused("ref_model", "the reference is the policy as it begins"),
        refused("ref_policy", "the reference is the policy as it begins"),
        refused("callbacks", "trainer.logger=path/to/file.py:class is told every step's metrics"),
        refused("compute_metrics", "validation has its metrics; megarl eval has others"),
        refused("preprocess_logits_for_metrics", "validation has its metrics"),
        refused("compute_loss_func", "algorithms of your own are path/to/file.py:name: megarl algorithms lists where"),
        refused("optimizers", "the optimizer is AdamW"),
        refused("optimizer_cls_and_kwargs", "the optimizer is AdamW"),
        refused("quantization_config", "weights are not quantized"),
    ]


def _optimizer() -> list[Entry]:
    rows = "prompts of a step, over all ranks"
    return [
        renamed("learning_rate", f"{OPTIM}.lr", "peak learning rate"),
        renamed("weight_decay", f"{OPTIM}.weight_decay", "AdamW's"),
        renamed("adam_beta1", f"{OPTIM}.adam_beta1", "AdamW's"),
        renamed("adam_beta2", f"{OPTIM}.adam_beta2", "AdamW's"),
        renamed("adam_epsilon", f"{OPTIM}.adam_eps", "AdamW's"),
        renamed("max_grad_norm", f"{OPTIM}.clip_grad", "L2 norm of all gradients"),
        ruled("warmup_steps", "translated", f"{OPTIM}.lr_warmup_steps", "linear; below 1 a share", _warm_up),
        renamed("warmup_ratio", f"{OPTIM}.lr_warmup_steps_ratio", "linear"),
        ruled("lr_scheduler_type", "translated", f"{OPTIM}.lr_decay_style", "after the warm-up", _schedule),
        ruled("lr_scheduler_kwargs", "translated", f"{OPTIM}.min_lr", "where the decay ends", _schedule_arguments),
        met_by("optim", ("adamw_torch", "adamw_torch_fused", "adamw_hf"), "always AdamW", "the optimizer is AdamW"),
        batch("per_device_train_batch_size", rows),
        batch("gradient_accumulation_steps", rows),
        refused("auto_find_batch_size", "megarl plan says what fits, before the run"),
        met("per_device_eval_batch_size", "the engine takes all validation prompts, as many at a time as fit"),
        met("eval_accumulation_steps", "the engine takes all validation prompts, as many at a time as fit"),
        renamed("num_train_epochs", "trainer.total_epochs", "passes over the rows", lambda value: max(1, round(value))),
        steps("max_steps", "trainer.total_training_steps", "steps; one here is a generated batch"),
        refused("label_smoothing_factor", "demonstrations' cross-entropy has no smoothing"),
        refused("neftune_noise_alpha", "no noise is added to embeddings"),
        refused(
            "router_aux_loss_coef", "experts have no balancing loss: it would change what the policy is trained for"
        ),
        ruled(
            "bf16", "translated", f"{M}.dtype", "weights' type", lambda v, _: {f"{M}.dtype": "bfloat16"} if v else {}
        ),
        refused("fp16", "weights are bfloat16 or float32: float16 needs loss scaling, which is not here"),
        met("tf32", "torch's setting"),
        met("bf16_full_eval", "validation runs in the weights' type"),
        renamed("gradient_checkpointing", f"{M}.enable_gradient_checkpointing", "activations are recomputed"),
        met("gradient_checkpointing_kwargs", "activations are recomputed layer by layer"),
        refused("activation_offloading", "gradient_checkpointing leaves a layer's inputs alone on the GPU"),
        met("use_cache", "training keeps no KV cache, generation does"),
        met("use_liger_kernel", "the vocabulary's logits are never held whole"),
        met("use_liger_loss", "the vocabulary's logits are never held whole"),
        met("liger_kernel_config", "the vocabulary's logits are never held whole"),
        met("average_tokens_across_devices", "losses are averaged over the tokens of all ranks"),
        met("torch_compile", "the program chooses the kernels"),
        met("torch_compile_*", "the program chooses the kernels"),
        met("torch_empty_cache_steps", "memory is given back between phases"),
        met("ddp_*", "gradients are reduced by Megatron-Core; trainer.timeout_minutes limits all waits"),
        refused("deepspeed", BACKEND),
        refused("fsdp", BACKEND, nothing=(None, "", [], False)),
        refused("fsdp_*", BACKEND, nothing=(None, {}, 0)),
        refused("accelerator_config", BACKEND, nothing=(None, {})),
        refused("parallelism_config", BACKEND, nothing=(None, {})),
    ]


def _run() -> list[Entry]:
    return [
        renamed("seed", "data.seed", "data order, weights and sampling"),
        renamed("data_seed", "data.seed", "data order, weights and sampling"),
        met("full_determinism", "what is drawn depends on data.seed alone"),
        renamed("output_dir", "trainer.default_local_dir", "the run folder"),
        met("overwrite_output_dir", "a used folder is gone on with, or refused"),
        renamed("run_name", "trainer.experiment_name", "names the run"),
        renamed("exp_name", "trainer.experiment_name", "names the run"),
        renamed("project", "trainer.project_name", "names runs that belong together"),
        ruled("report_to", "translated", "trainer.logger", "loggers", _report),
        met("logging_*", "every step is a row of metrics"),
        met("log_level", "rank 0 speaks for all"),
        met("log_level_replica", "rank 0 speaks for all"),
        met("log_on_each_node", "rank 0 speaks for all"),
        met("disable_tqdm", "a bar in a terminal, lines in a file"),
        met("include_num_input_tokens_seen", "metrics have the tokens of every step"),
        steps("save_steps", "trainer.save_freq", "steps between checkpoints; a step here is a generated batch"),
        renamed("save_total_limit", "trainer.max_ckpt_to_keep", "older ones are deleted"),
        met_by("save_strategy", ("steps",), "trainer.save_freq", "checkpoints are counted in steps: trainer.save_freq"),
        refused("save_only_model", "a checkpoint is all that a run goes on from; max_ckpt_to_keep bounds them"),
        steps("eval_steps", "trainer.test_freq", "steps between validations; a step here is a generated batch"),
        met_by(
            "eval_strategy", ("steps", "no"), "trainer.test_freq", "validations are counted in steps: trainer.test_freq"
        ),
        met_by("do_eval", (True,), "data.val_files", "leave data.val_files empty"),
        met("do_train", "that is what a run does"),
        renamed("eval_on_start", "trainer.val_before_train", "a validation before the first step"),
        refused("eval_delay", "trainer.test_freq counts from the first step"),
        renamed(
            "resume_from_checkpoint",
            "trainer.resume_mode",
            "the newest whole one",
            lambda v: "auto" if v else "disable",
        ),
        met("ignore_data_skip", "a run that goes on knows its place in the data"),
        refused("push_to_hub", HUB),
        met("hub_*", HUB),
        refused("load_best_model_at_end", BEST),
        refused("metric_for_best_model", BEST),
        met("greater_is_better", BEST),
    ]


ENTRIES: tuple[Entry, ...] = (*_started(), *_model_and_rows(), *_of_calls(), *_optimizer(), *_run())

"""What becomes of OpenRLHF's options of algorithms, optimizers, rows and the run, by the names of `openrlhf_names`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    worded,
)
from megarl.migration.openrlhf import CORRECTION, OPTIM, A, R, correction, kl, schedule, trainer_of
from megarl.migration.openrlhf_options import IMAGES

FILES = "rows are files: data.train_files=[x.jsonl] or parquet, also globs and s3:// URIs"


def _files(to: str) -> Callable[[Any, Settings], Made | Mapping[str, Any]]:
    def rule(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
        files = str(value).split(",")
        if value and all(file.endswith((".jsonl", ".parquet")) for file in files):
            return {to: files}
        return Made(kind="refused", why=FILES)

    return rule


def _estimator(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {
        "gae": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "group_norm": "grpo",
        "dr_grpo": "dr_grpo",
    }
    if value not in names:
        return Made(kind="refused", why="megarl algorithms lists the estimators")
    return {"algorithm.adv_estimator": names[value]}


def _prompt_key(value: Any, settings: Settings) -> Mapping[str, Any]:
    if trainer_of(settings) == "sft" and not settings.of("data.output_key"):
        return {"data.messages_key": value}
    return {"data.prompt_key": value} if value else {}


def _label_key(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"data.label_key" if trainer_of(settings) == "kto" else "data.answer_key": value} if value else {}


def _clip(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{A}.clip_ratio_low": value[0], f"{A}.clip_ratio_high": value[1]} if value else {}


def _logger(name: str) -> Callable[[Any, Settings], Made | Mapping[str, Any]]:
    other = {"wandb": "logger.tensorboard_dir", "tensorboard": "logger.wandb.key"}[name]

    def rule(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
        if not value:
            return {}
        if name not in settings.loggers:
            return Made(kind="refused", why=f"no logger {name} here: tensorboard, csv or path/to/file.py:class")
        beside = {"wandb": "tensorboard", "tensorboard": "wandb"}[name]
        both = [beside] if settings.of(other) and beside in settings.loggers else []
        return {"trainer.logger": ["console", "jsonl", *sorted([name, *both])]}

    return rule


def _overlong(value: Any, settings: Settings) -> Mapping[str, Any]:
    own = "reward.overlong_buffer"
    return {f"{own}.enable": True, f"{own}.len": value} if value else {}


def _range(value: Any, settings: Settings) -> Made:
    if value is None or list(value) == [0, 1] or not settings.of("algo.dynamic_filtering_enable"):
        return Made(kind="translated", why="groups whose responses all scored the same are left out")
    return Made(kind="refused", why="only groups whose responses all scored the same are left out: data.filter")


def _steps(key: str, to: str, never: int, why: str) -> Entry:
    return renamed(key, to, why, lambda value: never if value == -1 else value)


def _algorithm() -> list[Entry]:
    where, weighed = "a part of the loss, or of the reward", "weights for the engine's distribution"
    names = ("level", "mode", "threshold")
    return [
        ruled("algo.advantage.estimator", "translated", "algorithm.adv_estimator", "group_norm is grpo's", _estimator),
        renamed("algo.advantage.gamma", "algorithm.gamma", "discount"),
        renamed("algo.advantage.lambd", "algorithm.lam", "GAE"),
        ruled(
            "algo.advantage.no_std_norm",
            "translated",
            "algorithm.norm_adv_by_std_in_grpo",
            "by the group's deviation",
            lambda value, _: {"algorithm.norm_adv_by_std_in_grpo": not value},
        ),
        *(derived(f"algo.advantage.is_correction_{x}", f"{CORRECTION}.*", weighed, correction) for x in names),
        met_by("algo.advantage.is_correction_gating", ("ratio",), weighed, "weights are bounded by the ratio"),
        derived("enable_vllm_is_correction", f"{CORRECTION}.*", weighed, correction),
        derived("vllm_is_correction_type", f"{CORRECTION}.*", weighed, correction),
        derived("vllm_is_truncated_threshold", f"{CORRECTION}.*", weighed, correction),
        derived("use_icepop", f"{CORRECTION}.*", weighed, correction),
        derived("algo.kl.init_coef", "algorithm.kl_ctrl.kl_coef", where, kl),
        derived("algo.kl.use_loss", f"{A}.use_kl_loss", where, kl),
        derived("algo.kl.estimator", f"{A}.kl_loss_type, algorithm.kl_penalty", where, kl),
        derived("algo.kl.estimator_k3", f"{A}.kl_loss_type, algorithm.kl_penalty", where, kl),
        refused("algo.kl.target", "algorithm.kl_ctrl.type=adaptive has a target_kl per response, in nats"),
        part_of("algo.kl.horizon", ["algo.kl.target"], "algorithm.kl_ctrl.horizon"),
        refused("algo.kl.unbiased_gradient", "actor.kl_loss_type=k3+ has k3's value and k2's gradient"),
        switch("algo.dynamic_filtering_enable", "algorithm.filter_groups.enable", "groups that teach nothing"),
        ruled("algo.dynamic_filtering_range", "translated", "", "groups that teach nothing", _range),
        renamed("actor.eps_clip", f"{A}.clip_ratio", "clip range"),
        ruled("actor.eps_clip_low_high", "translated", f"{A}.clip_ratio_low, clip_ratio_high", "clip range", _clip),
        renamed("actor.dual_clip", f"{A}.clip_ratio_c", "dual clip"),
        renamed("critic.value_clip", "critic.cliprange_value", "values"),
        worded("actor.policy_loss_type", f"{A}.policy_loss.loss_mode", {"ppo": "vanilla"}, "ppo is vanilla"),
        renamed("actor.loss_agg_mode", f"{A}.loss_agg_mode", "how tokens add up"),
        renamed("actor.entropy_coef", f"{A}.entropy_coeff", "entropy bonus"),
        refused("reward.normalize_enable", "rewards are not normalized; estimators compare or whiten advantages"),
        refused("reward.clip_range", "rewards are not clipped: bound them in the reward", nothing=(None, [-10, 10])),
        ruled("reward.overlong_buffer_len", "translated", "reward.overlong_buffer.len", "the same penalty", _overlong),
        renamed("reward.overlong_penalty_factor", "reward.overlong_buffer.penalty_factor", "the same penalty"),
        refused("reward.stop_properly_penalty_coef", "finish_reason in a reward of your own", nothing=(None,)),
    ]


def _examples() -> list[Entry]:
    preference = "algorithm.preference"
    return [
        renamed("model.beta", f"{preference}.beta", "strength of the KL"),
        ruled(
            "model.ipo_enable",
            "translated",
            f"{preference}.loss_mode",
            "IPO",
            lambda value, _: {f"{preference}.loss_mode": "ipo"} if value else {},
        ),
        renamed("model.label_smoothing", f"{preference}.label_smoothing", "share of pairs the wrong way round"),
        renamed("model.nll_loss_coef", f"{preference}.sft_coef", "the chosen answers' cross-entropy beside it"),
        renamed("desirable_loss_weight", f"{preference}.desirable_weight", "KTO"),
        renamed("undesirable_loss_weight", f"{preference}.undesirable_weight", "KTO"),
        met("unpaired_preference", "rows of KTO are single answers"),
        met_by("model.loss_type", ("sigmoid",), "Bradley-Terry", "the loss on pairs is Bradley-Terry's"),
        ruled(
            "model.margin_loss_enable",
            "translated",
            "data.margin_key",
            "column with how much better the chosen answer is",
            lambda value, _: {"data.margin_key": "margin"} if value else {},
        ),
        met("model.compute_fp32_loss_enable", "losses are computed in float32"),
        refused("model.pretrain_mode_enable", "of a prompt and its answer, or of a conversation, answers are learnt"),
    ]


def _optimizer(model: str, own: str) -> list[Entry]:
    def decay(settings: Settings) -> Mapping[str, Any]:
        return schedule(settings, model)

    return [
        renamed(f"{model}.adam.lr", f"{own}.lr", "peak learning rate"),
        ruled(
            f"{model}.adam.betas",
            "translated",
            f"{own}.adam_beta1, adam_beta2",
            "two keys",
            lambda value, _: {f"{own}.adam_beta1": value[0], f"{own}.adam_beta2": value[1]},
        ),
        renamed(f"{model}.adam.eps", f"{own}.adam_eps", "AdamW's"),
        renamed(f"{model}.adam.weight_decay", f"{own}.weight_decay", "AdamW's"),
        met_by(f"{model}.optim", ("adam",), "always AdamW", "the optimizer is AdamW"),
        met(f"{model}.muon.*", "of the optimizer muon, which is not here"),
        derived(f"{model}.lr_scheduler", f"{own}.lr_decay_style", "after the warm-up", decay),
        derived(f"{model}.min_lr_ratio", f"{own}.min_lr", "where the decay ends", decay),
        renamed(f"{model}.lr_warmup_ratio", f"{own}.lr_warmup_steps_ratio", "linear"),
        renamed(f"{model}.max_norm", f"{own}.clip_grad", "L2 norm of all gradients"),
    ]


def _rows() -> list[Entry]:
    return [
        ruled("data.dataset", "translated", "data.train_files", FILES, _files("data.train_files")),
        refused("data.dataset_probs", "data.weights has a weight for each of data.train_files", nothing=(None, 1, 1.0)),
        refused("data.dataset_split", FILES, nothing=(None, "train")),
        refused("data.max_samples", "data.filter leaves rows out; trainer.total_training_steps ends a run sooner"),
        ruled("data.input_key", "translated", "data.prompt_key", "column of prompts, or conversations", _prompt_key),
        renamed("data.output_key", "data.answer_key", "column of the answer"),
        ruled("data.label_key", "translated", "data.answer_key", "the reference answer; of KTO the label", _label_key),
        renamed("data.prompt_key", "data.prompt_key", "column of prompts"),
        renamed("data.chosen_key", "data.chosen_key", "the better answer"),
        renamed("data.rejected_key", "data.rejected_key", "the other answer"),
        met("data.multiturn", "every turn of the assistant is learnt"),
        met("data.apply_chat_template", "messages are shown by the chat template, texts as they are"),
        refused("data.tokenizer_chat_template", "the tokenizer's folder holds the chat template; change it there"),
        refused("data.input_template", "prompts are texts or messages as they are: rows of your own are data.source"),
        met("data.disable_fast_tokenizer", "the tokenizer is what its folder holds"),
        met("data.dataloader_num_workers", "rows lie mapped on disk"),
        refused("data.image_key", IMAGES, nothing=(None, "images")),
        refused("data.max_images_per_prompt", IMAGES),
        ruled("eval.dataset", "translated", "data.val_files", FILES, _files("data.val_files")),
        refused("eval.split", FILES, nothing=(None, "train", "test")),
        renamed("eval.temperature", f"{R}.val_kwargs.temperature", "of validation"),
        renamed("eval.n_samples_per_prompt", f"{R}.val_kwargs.n", "responses to a held-out prompt"),
        _steps("eval.steps", "trainer.test_freq", 0, "steps between validations; -1 is none, here 0"),
    ]


def _run() -> list[Entry]:
    best = "trainer.best_metric=val/accuracy, say, keeps the step with the best validation"
    return [
        renamed("ckpt.output_dir", "trainer.default_local_dir", "the run folder"),
        met("ckpt.path", "checkpoints are in the run folder: trainer.default_local_dir"),
        _steps("ckpt.save_steps", "trainer.save_freq", -1, "steps between checkpoints; -1 is one at the end"),
        renamed("ckpt.save_hf", "checkpoint.save_hf", "a Hugging Face folder with each checkpoint"),
        met("ckpt.disable_ds", "a checkpoint is all that a run goes on from"),
        renamed("ckpt.max_num", "trainer.max_ckpt_to_keep", "older ones are deleted"),
        refused("ckpt.max_mem", "trainer.max_ckpt_to_keep bounds them"),
        derived(
            "ckpt.load_enable", "trainer.resume_mode", "the newest whole one", lambda _: {"trainer.resume_mode": "auto"}
        ),
        refused("ckpt.best_metric_key", best),
        met("logger.logging_steps", "every step is a row of metrics"),
        ruled("logger.wandb.key", "translated", "trainer.logger", "WANDB_API_KEY has the account", _logger("wandb")),
        ruled("logger.tensorboard_dir", "translated", "trainer.logger", "in the run folder", _logger("tensorboard")),
        renamed("logger.wandb.project", "trainer.project_name", "names runs that belong together"),
        renamed("logger.wandb.run_name", "trainer.experiment_name", "names the run"),
        refused("logger.wandb.org", "WANDB_ENTITY says it"),
        refused("logger.wandb.group", "WANDB_RUN_GROUP says it"),
        met("perf", "metrics have the pace of every step"),
    ]


ENTRIES: tuple[Entry, ...] = (
    *_algorithm(),
    *_examples(),
    *_optimizer("actor", OPTIM),
    *_optimizer("critic", "critic.optim"),
    *_rows(),
    *_run(),
)

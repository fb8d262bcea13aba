"""verl's keys of data, algorithm, reward function and trainer."""

from __future__ import annotations

from collections.abc import Mapping
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
from megarl.migration.hydra import INCLUDED, NAME
from megarl.migration.verl import A, R, needs_critic

KL = {"kl": "k1", "low_var_kl": "k3", "mse": "k2", "low_var_kl+": "k3+", "kl+": "k1+", "full": None}
"""verl's older names of KL estimators; None: there is none."""

ESTIMATORS = {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "gpg": "dr_grpo",
    "gdpo": None,
    "optimal_token_baseline": None,
    "tir_optimal_token_baseline": None,
}

LOGGERS = {"file": "jsonl"}

_IMAGES = "images, video and audio are not read: models are language models; use rows of text"
_ROWS = "rows are read by MegaRL: data.source=path/to/file.py:function gives rows of your own"
_ROLLOUTS = "sample rollouts of every step and all of a validation are written to the run folder: trainer.log_rollouts"
_RAY = "there is no Ray: ranks are started by megarl train, torchrun or srun"


def _files(to: str, key: str) -> Entry:
    def rule(value: Any, settings: Settings) -> Made:
        if isinstance(value, str):
            return Made(kind="carried", values={to: [value]}, why="a list of files")
        return Made(kind="carried", values={} if value is None else {to: value})

    return ruled(key, "carried", to, "one file is a list of one", rule)


def _no_images(value: Any, settings: Settings) -> Made:
    listed = (settings.of("data.image_key"), settings.of("data.video_key")) == ("images", "videos")
    if value is None or listed:
        return Made(kind="translated", why="verl's own names of columns" if listed else "asks for nothing")
    return Made(kind="refused", why=_IMAGES)


def _kl_loss(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if value in ("kl", "k1"):
        why = "the gradient of k1 as a loss is zero on-policy: k1+ has its value and the gradient of k2"
        return Made(kind="translated", values={f"{A}.kl_loss_type": "k1+"}, why=why)
    if value == "full":
        return Made(kind="refused", why="the KL over the whole vocabulary is not computed; use k3")
    new = KL.get(str(value), value)
    return Made(kind="carried" if new == value else "translated", values={f"{A}.kl_loss_type": new}, why="k-names")


def _logger(value: Any, settings: Settings) -> Made:
    wanted = [value] if isinstance(value, str) else list(value or [])
    names = [LOGGERS.get(name, name) for name in wanted]
    there = [name for name in names if name in settings.loggers]
    gone = [name for name in names if name not in settings.loggers]
    kept = {"trainer.logger": [*there, *(["jsonl"] if "jsonl" not in there else [])]}
    if gone:
        why = f"no logger {', '.join(map(str, gone))} here: tensorboard, csv or path/to/file.py:class; the others go on"
        return Made(kind="refused" if not there else "translated", values=kept, why=why)
    return Made(kind="carried", values=kept, why="with jsonl, which megarl's own commands read")


def _draws(value: Any, settings: Settings) -> Made:
    if not settings.of("algorithm.filter_groups.enable"):
        return Made(kind="translated", why="the size of a draw with algorithm.filter_groups, which is off")
    return Made(kind="carried", values={} if value is None else {"data.gen_batch_size": value})


def _target_kl(value: Any, settings: Settings) -> Made:
    if value is None or settings.of("algorithm.kl_ctrl.type") != "adaptive":
        return Made(kind="translated", why="a fixed coefficient has no target")
    why = (
        "verl's target is KL per token, here it is per response: set algorithm.kl_ctrl.target_kl to that many times as "
    )
    return Made(kind="refused", why=why + "much as a response has tokens")


def _critic_warmup(value: Any, settings: Settings) -> Made:
    if value and not needs_critic(settings):
        return Made(kind="translated", why="the estimator has no critic to warm up")
    return Made(kind="carried", values={} if value is None else {"trainer.critic_warmup": value})


def _function(value: Any, settings: Settings) -> Mapping[str, Any]:
    name = settings.of("custom_reward_function.name") or "compute_score"
    return {"reward.name": f"{value}:{name}"} if value else {}


def _manager(value: Any, settings: Settings) -> Made:
    if value == "batch":
        why = "the function takes lists of data_sources, solution_strs, ground_truths and extra_infos"
        return Made(kind="translated", values={"reward.batch_size": 64}, why=why)
    if value in ("naive", "prime", "dapo", None):
        why = "functions score responses as they finish, in processes of their own; dapo's penalty is overlong_buffer"
        return Made(kind="translated", why=why)
    return Made(kind="refused", why="a manager of your own is a function here: reward.name=path/to/file.py:function")


def _ground_truths(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if isinstance(value, Mapping) or value is None:
        return {"reward.args": dict(value or {})}
    return Made(kind="refused", why="it must be a mapping of keyword arguments")


def _save_contents(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"checkpoint.save_hf": True} if "hf_model" in (value or []) else {}


def _over_sample(value: Any, settings: Settings) -> Mapping[str, Any]:
    if not value:
        return {}
    prompts, weights = settings.number("data.train_batch_size"), "algorithm.rollout_correction.rollout_is"
    return {
        f"{R}.carry_over.enable": True,
        f"{R}.carry_over.groups": min(2 * prompts, prompts + max(1, round(prompts * float(value)))),
        weights: settings.of(weights) or "token",
    }


def _rejection(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    names = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    if value in (None, "token", "sequence", "geometric"):
        return Made(kind="carried", values={"algorithm.rollout_correction.rollout_rs": value})
    if value in names:
        return {"algorithm.rollout_correction.rollout_rs": names[value]}
    return Made(kind="refused", why="responses are rejected by token, sequence or geometric ratios here")


def _overlong(name: str, value_of_null: Any) -> Entry:
    key = f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}"
    why = "the same penalty (DAPO, eq. 13)"
    return renamed(key, f"reward.overlong_buffer.{name}", why, lambda value: value_of_null if value is None else value)


def _data() -> list[Entry]:
    return [
        _files("data.train_files", "data.train_files"),
        _files("data.val_files", "data.val_files"),
        *carried("data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
        ruled("data.gen_batch_size", "carried", "data.gen_batch_size", "only with algorithm.filter_groups", _draws),
        *carried("data.filter_overlong_prompts", "data.truncation", "data.shuffle", "data.prompt_key"),
        renamed("data.seed", "data.seed", "seeds data order and sampling"),
        renamed("data.reward_fn_key", "data.source_key", "column that names where a row comes from"),
        met("data.return_raw_chat", "the chat messages always reach rewards, environments and agents with their row"),
        met("data.return_raw_input_ids", "token ids are kept as they are"),
        met("data.return_full_prompt", "rewards and records have the row"),
        met("data.val_batch_size", "the engine takes all validation prompts, as many at a time as its cache holds"),
        met("data.validation_shuffle", "the result of a validation does not depend on the order of its prompts"),
        met("data.dataloader_num_workers", "rows are looked at once, by all cores, and lie mapped on disk"),
        met("data.filter_overlong_prompts_workers", "rows are looked at by all cores"),
        met("data.use_shm", "rows lie on disk, in an index that all ranks map"),
        renamed("data.tokenizer", "actor_rollout_ref.model.tokenizer_path", "the policy's tokenizer"),
        refused(
            "data.trust_remote_code",
            "no code of a model's or tokenizer's folder is run; the tokenizer must load as it is",
        ),
        *(ruled(f"data.{name}_key", "refused", "", _IMAGES, _no_images) for name in ("image", "video", "audio")),
        met("data.return_multi_modal_inputs", "rows are of text"),
        refused("data.custom_cls.path", _ROWS),
        refused("data.custom_cls.name", _ROWS),
        refused("data.sampler.class_path", "an order of your own is data.curriculum=path/to/file.py:function"),
        refused("data.sampler.class_name", "an order of your own is data.curriculum=path/to/file.py:function"),
        *carried("data.apply_chat_template_kwargs.*", why="what the chat template is told beside the messages"),
        refused("data.curriculum.*", "an order of your own is data.curriculum=path/to/file.py:function"),
        refused("data.train_max_samples", "data.filter leaves rows out"),
        refused("data.val_max_samples", "give data.val_files fewer rows"),
        refused("data.datagen.*", _ROWS),
        refused("data.mm_preprocessor.*", _IMAGES),
        refused("data.tool_config_path", "tools are an environment: environment.name or environment.agent"),
    ]


def _algorithm() -> list[Entry]:
    correction = "algorithm.rollout_correction"
    why = "megarl algorithms lists the names; GPG's advantages are dr_grpo's"
    return [
        worded("algorithm.adv_estimator", "algorithm.adv_estimator", ESTIMATORS, why),
        *carried("algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward"),
        worded("algorithm.kl_penalty", "algorithm.kl_penalty", KL, "kl is k1, mse k2, low_var_kl k3"),
        *carried(*(f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon"))),
        ruled(
            "algorithm.kl_ctrl.target_kl",
            "translated",
            "algorithm.kl_ctrl.target_kl",
            "nats per response; verl's are per token",
            _target_kl,
        ),
        *carried("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"),
        worded(
            "algorithm.filter_groups.metric",
            "algorithm.filter_groups.metric",
            {"seq_final_reward": "seq_reward"},
            "acc, score or seq_reward",
        ),
        *carried(
            f"{correction}.rollout_is", f"{correction}.rollout_is_threshold", f"{correction}.rollout_rs_threshold"
        ),
        *carried(f"{correction}.rollout_rs_threshold_lower", f"{correction}.rollout_token_veto_threshold"),
        ruled(
            f"{correction}.rollout_rs", "carried", f"{correction}.rollout_rs", "token, sequence, geometric", _rejection
        ),
        refused(
            f"{correction}.bypass_mode",
            "log-probabilities of the training layout are always the old policy's; leave it out",
        ),
        met_by(
            f"{correction}.loss_type",
            ("ppo_clip",),
            "the loss is actor.policy_loss.loss_mode's",
            "set actor.policy_loss.loss_mode=reinforce",
        ),
        refused(f"{correction}.use_pure_rollout_correction", "set actor.policy_loss.loss_mode=reinforce"),
        *carried(f"{correction}.rollout_is_batch_normalize"),
        refused(
            "algorithm.use_pf_ppo",
            "there is no resampling by score (PF-PPO); algorithm.filter_groups leaves groups out",
        ),
        part_of("algorithm.pf_ppo.*", ["algorithm.use_pf_ppo"], "there is no resampling by score (PF-PPO)"),
    ]


def _reward() -> list[Entry]:
    own = "called with data_source, solution_str, ground_truth and extra_info, as in verl"
    old = "custom_reward_function"
    return [
        ruled(f"{old}.path", "translated", "reward.name", f"path.py:function, {own}", _function),
        met(f"{old}.name", "part of reward.name, after the file's path"),
        ruled(f"{old}.reward_kwargs", "translated", "reward.args", "keyword arguments of the function", _ground_truths),
        _arguments(),
        ruled("reward_model.reward_manager", "translated", "reward.*", "scoring is always parallel", _manager),
        ruled("reward.reward_manager.name", "translated", "reward.*", "scoring is always parallel", _manager),
        _overlong("enable", False),
        _overlong("len", 0),
        _overlong("penalty_factor", 1.0),
        met("reward_model.reward_kwargs.overlong_buffer_cfg.log", "the penalty is always among the metrics"),
        met("reward_model.reward_kwargs.max_resp_len", "the penalty ends at data.max_response_length"),
        renamed("reward_model.sandbox_fusion.max_concurrent", "reward.workers", "processes that score"),
        refused(
            "reward_model.sandbox_fusion.url",
            "code is run in namespaces of the node: reward.name=code, without a server",
        ),
        refused("reward_model.sandbox_fusion.*", "code is run in namespaces of the node: reward.name=code"),
    ]


def _arguments() -> Entry:
    head = "custom_reward_function.reward_kwargs."

    def rule(key: str, value: Any, settings: Settings) -> Made:
        return Made(kind="translated", values={f"reward.args.{key.removeprefix(head)}": value}, why="reward.args")

    return Entry(
        key=f"{head}*", kind="translated", to="reward.args.*", why="keyword arguments of the function", rule=rule
    )


def _trainer() -> list[Entry]:
    kept = "a checkpoint holds all models; the newest so many stay"
    profiles = "profiles are of the whole run: profiler.tool, profiler.steps, profiler.ranks"
    return [
        *carried("trainer.project_name", "trainer.experiment_name", "trainer.n_gpus_per_node", "trainer.nnodes"),
        *carried("trainer.total_epochs", "trainer.total_training_steps", "trainer.val_before_train"),
        *carried("trainer.default_local_dir", "trainer.resume_mode", "trainer.balance_batch"),
        Entry(
            key="trainer.save_freq",
            kind="carried",
            to="trainer.save_freq",
            why="-1 saves at the end here; 0 never",
            rule=_frequency,
        ),
        Entry(
            key="trainer.test_freq",
            kind="carried",
            to="trainer.test_freq",
            why="-1 validates at the end here; 0 never",
            rule=_frequency,
        ),
        renamed(
            "trainer.resume_from_path", "trainer.resume_from_path", "a folder of MegaRL's", lambda value: value or ""
        ),
        ruled("trainer.critic_warmup", "carried", "trainer.critic_warmup", "only with a critic", _critic_warmup),
        ruled("trainer.logger", "carried", "trainer.logger", "console, tensorboard, file (jsonl), ...", _logger),
        renamed("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", kept),
        renamed("trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep", kept),
        met("trainer.log_val_generations", _ROLLOUTS),
        met("trainer.rollout_data_dir", _ROLLOUTS),
        met("trainer.validation_data_dir", _ROLLOUTS),
        met("trainer.use_legacy_worker_impl", "there is one implementation"),
        met("trainer.use_v1", "there is one trainer"),
        met_by(
            "trainer.v1.trainer_mode",
            ("sync",),
            "responses are generated, then trained on",
            "rollout.carry_over goes on with unfinished responses in the next step; there is no other asynchrony",
        ),
        met("trainer.v1.*", "of another trainer.v1.trainer_mode"),
        refused("trainer.val_only", "an evaluation is a command: megarl eval PATH CONFIG"),
        refused("trainer.default_hdfs_dir", "checkpoints are written to trainer.default_local_dir"),
        refused("trainer.del_local_ckpt_after_load", "trainer.max_ckpt_to_keep deletes older checkpoints"),
        refused("trainer.esi_redundant_time", "trainer.stop_timeout: a signal ends the step, saves and leaves"),
        refused("trainer.remove_previous_ckpt_in_save", "trainer.max_ckpt_to_keep deletes older checkpoints"),
        met("trainer.ray_wait_register_center_timeout", _RAY),
        met_by(
            "trainer.device",
            ("cuda", "cpu"),
            "GPUs where there are some, CPU ranks otherwise",
            "NVIDIA GPUs or CPUs only",
        ),
        renamed("trainer.profile_steps", "profiler.steps", profiles),
        renamed("global_profiler.steps", "profiler.steps", profiles),
        refused("global_profiler.tool", profiles),
        part_of("global_profiler.*", ["global_profiler.tool"], profiles),
        met_by("model_engine", ("megatron",), "always Megatron", "there is no FSDP: the layout is actor.megatron.*"),
        refused(NAME, "there is no such file from the script's folder up: name it before the script"),
        refused(INCLUDED, "these files are not beside the one that includes them: name them before it"),
        met("hydra.*", "Hydra's own: where it runs and logs"),
        met("ray_kwargs.*", _RAY),
        met("ray_init.*", _RAY),
        refused("transfer_queue.*", "data stay in the ranks' memory: there is no queue to set up"),
    ]


def _frequency(key: str, value: Any, settings: Settings) -> Made:
    if value is None:
        return Made(kind="translated", why="asks for nothing")
    return Made(kind="carried", values={key: value}, why="at the end of the run only" if value == -1 else "")


ENTRIES: tuple[Entry, ...] = (
    *_data(),
    *_algorithm(),
    *_reward(),
    *_trainer(),
    ruled(f"{A}.kl_loss_type", "carried", f"{A}.kl_loss_type", "low_var_kl is k3, kl is k1+, mse k2", _kl_loss),
    ruled(
        f"{A}.checkpoint.save_contents",
        "translated",
        "checkpoint.save_hf",
        "weights, optimizer and the rest are always saved; hf_model is checkpoint.save_hf",
        _save_contents,
    ),
    met(f"{A}.checkpoint.*", "a checkpoint always holds and loads all that resuming needs"),
    met("critic.checkpoint.*", "a checkpoint always holds and loads all that resuming needs"),
    ruled(
        f"{R}.over_sample_rate",
        "translated",
        f"{R}.carry_over",
        "generation stops when enough responses are finished; the others go on in the next step, and are weighed",
        _over_sample,
    ),
)

"""Defines the sections of the run itself: warm-up, steps, records and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megarl.config.fields import Identity, NonEmpty, Section, Size, Whole
from megarl.config.policy import FastOptimConfig


class WarmupConfig(Section):
    """Sets a supervised phase before the RL steps: cross-entropy on `data.answer_key`, then a fresh optimizer."""

    train_files: list[str] = Field(default_factory=list, description="demonstrations; default data.train_files")
    total_training_steps: Whole = Field(0, ge=0, description="optimizer steps; 0 skips the phase")
    train_batch_size: Size = Field(256, ge=1, description="examples per step, over all ranks")
    optim: FastOptimConfig = FastOptimConfig()


class TrainerConfig(Section):
    """Sets the run itself: flow, length, validation, checkpoints, failures and records."""

    flow: NonEmpty = Field("ppo", description="the run's loop: a registered flow, or path/to/file.py:function")
    nnodes: Size = Field(1, ge=1, description="number of machines")
    n_gpus_per_node: Size = Field(1, ge=1, description="ranks per node; CPU ranks on a machine without GPUs")
    total_epochs: Whole = Field(
        1, ge=1, description="passes over the training prompts, unless total_training_steps is set"
    )
    total_training_steps: Whole | None = Field(None, ge=1, description="steps; overrides total_epochs")
    critic_warmup: Whole = Field(0, ge=0, description="number of first steps that train only the critic")
    save_freq: Whole = Field(-1, ge=-1, description="steps between checkpoints; -1 saves only at the end, 0 never")
    max_ckpt_to_keep: Whole | None = Field(None, ge=1, description="number of newest checkpoints to keep; default: all")
    best_metric: str = Field(
        "",
        description="a metric of the validation, such as val/accuracy: the step with its best value is saved, "
        "regardless of save_freq, kept in addition to the max_ckpt_to_keep newest, and named in checkpoints/best.json; "
        "default none",
    )
    best_mode: Literal["max", "min"] = Field("max", description="whether the highest or the lowest best_metric is best")
    test_freq: Whole = Field(-1, ge=-1, description="steps between validations; -1 validates only at the end, 0 never")
    val_before_train: bool = Field(True, description="validate before the first step")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto", description="auto resumes from the run folder's latest checkpoint, if there is one"
    )
    resume_from_path: str = Field("", description="a global_step_N folder, for resume_mode=resume_path")
    resume_allow: list[Identity] = Field(
        default_factory=list,
        description="parts of the run that may differ from those of the checkpoint it resumes from",
    )
    on_nonfinite: Literal["skip", "stop", "rollback"] = Field(
        "skip",
        description="reaction to a loss or gradient norm that is not finite: skip omits the optimizer step, and ends "
        "the run after 3 in a row; stop ends the run; rollback returns to the last checkpoint and continues with the "
        "batches after the bad one",
    )
    timeout_minutes: float = Field(
        30.0, gt=0, le=100_000, description="a rank that waits longer for other ranks ends the run and names them"
    )
    stop_timeout: float = Field(
        300.0, gt=0, le=86_400, description="seconds to finish the step, save and exit after a signal to stop"
    )
    agreement_freq: Whole = Field(
        10,
        ge=0,
        description="steps between two checks that ranks with the same tokens computed the same advantages, all ranks "
        "have the same scores, and the engine holds the actor's weights, the first step included; 0 never",
    )
    logger: list[str] = Field(
        default=["console", "jsonl", "tensorboard"],
        description="destinations of metrics: console, jsonl, csv, tensorboard, prometheus, wandb, mlflow (see the "
        "section telemetry), or path/to/file.py:class",
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "warning",
        description="lowest level of the libraries' log records that RUN/logs keeps; the console shows warnings and "
        "errors",
    )
    project_name: str = Field(
        "megarl", description="the project's name: a folder of several runs, and a label of metrics"
    )
    experiment_name: str = Field("run", description="the run's name: its folder, and a label of metrics")
    default_local_dir: str = Field("", description="run folder; default runs/{project_name}/{experiment_name}")
    balance_batch: bool = Field(True, description="balance tokens over data-parallel ranks")
    deterministic: bool = Field(
        False,
        description="use only kernels that sum in a fixed order, so that a repeated run, or a killed and resumed run, "
        "has the same bits on the same GPUs; slower; not with rollout.name=vllm or an environment",
    )
    log_rollouts: Size = Field(
        8,
        ge=-1,
        description="number of sample rollouts written to the run folder at each step, as whole groups if possible; -1 "
        "writes all, 0 none; unless 0, all responses of a validation are written",
    )

    @property
    def run_dir(self) -> str:
        return self.default_local_dir or f"runs/{self.project_name}/{self.experiment_name}"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


class CheckpointConfig(Section):
    """Sets the contents of checkpoints beyond the state for resuming, and how they are written and verified."""

    async_save: bool = Field(
        True,
        description="copy what is saved into host memory (pinned, where there is a GPU) and write it while the next "
        "steps run; otherwise training stops until the files are on the disk",
    )

    local_dir: str = Field(
        "",
        description="folder on a disk of each node's own: checkpoints are written there first, and copied into the run "
        "folder while the next steps run, so that one may follow another before the first is copied; what a job that "
        "died has left there is copied when the run goes on",
    )
    save_contents: list[Literal["model", "optimizer", "hf_model"]] = Field(
        default=["model", "optimizer"],
        description="parts of a checkpoint: model is the weights; optimizer its fp32 weights and moments, without "
        "which a resumed run begins with new ones; hf_model the actor, or the model that a reward_model run trains, as "
        "a Hugging Face folder, global_step_N/huggingface. No run can resume without model",
    )
    verify: bool = Field(True, description="compare every file with the checkpoint's manifest before loading it")

    @property
    def exports(self) -> bool:
        """Tell whether checkpoints hold a Hugging Face folder."""
        return "hf_model" in self.save_contents

    @field_validator("save_contents")
    @classmethod
    def _can_be_used(cls, value: list[str]) -> list[str]:
        if not {"model", "hf_model"} & set(value) or ("optimizer" in value and "model" not in value):
            raise ValueError("a checkpoint holds model or hf_model, and optimizer beside model")
        return list(dict.fromkeys(value))

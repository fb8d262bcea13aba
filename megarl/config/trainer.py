"""The run itself: warm-up, steps, records and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.fields import Identity, NonEmpty, Section, Size, Whole
from megarl.config.policy import OptimConfig


class WarmupOptimConfig(OptimConfig):
    """The same, with a default of its own."""

    lr: float = Field(1e-5, gt=0, le=1, description="peak learning rate")


class WarmupConfig(Section):
    """A supervised phase before the RL steps: cross-entropy on `data.answer_key`, then a fresh optimizer."""

    train_files: list[str] = Field(default_factory=list, description="demonstrations; default data.train_files")
    total_training_steps: Whole = Field(0, ge=0, description="optimizer steps; 0 skips the phase")
    train_batch_size: Size = Field(256, ge=1, description="examples per step, over all ranks")
    optim: WarmupOptimConfig = WarmupOptimConfig()


class TrainerConfig(Section):
    """The run itself."""

    flow: NonEmpty = Field("ppo", description="what the run does: a registered flow, or path/to/file.py:function")
    nnodes: Size = Field(1, ge=1, description="machines")
    n_gpus_per_node: Size = Field(1, ge=1, description="ranks per node (CPU ranks where there is no GPU)")
    total_epochs: Whole = Field(
        1, ge=1, description="passes over the training prompts, unless total_training_steps is set"
    )
    total_training_steps: Whole | None = Field(None, ge=1, description="steps; overrides total_epochs")
    critic_warmup: Whole = Field(0, ge=0, description="first steps in which only the critic is trained")
    save_freq: Whole = Field(-1, ge=-1, description="steps between checkpoints; -1 saves only at the end, 0 never")
    max_ckpt_to_keep: Whole | None = Field(None, ge=1, description="older checkpoints are deleted; default keeps all")
    best_metric: str = Field(
        "",
        description="a metric of the validation, such as val/accuracy: the step with the best one is saved, whatever "
        "save_freq says, stays beside the max_ckpt_to_keep newest, and is named in checkpoints/best.json; default none",
    )
    best_mode: Literal["max", "min"] = Field("max", description="whether a high or a low best_metric is good")
    test_freq: Whole = Field(-1, ge=-1, description="steps between validations; -1 validates only at the end, 0 never")
    val_before_train: bool = Field(True, description="validate before the first step")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto", description="auto goes on from the run folder's latest checkpoint, if any"
    )
    resume_from_path: str = Field("", description="a global_step_N folder, for resume_mode=resume_path")
    resume_allow: list[Identity] = Field(
        default_factory=list, description="parts of a run that may differ from the checkpoint that it goes on from"
    )
    on_nonfinite: Literal["skip", "stop", "rollback"] = Field(
        "skip",
        description="a loss or gradient norm that is not finite: skip leaves the optimizer step out, and stops after 3 "
        "in a row; stop ends the run; rollback goes on from the last checkpoint, with the batches after the bad one",
    )
    timeout_minutes: float = Field(
        30.0, gt=0, le=100_000, description="a rank that waits longer for the others ends the run, and names them"
    )
    stop_timeout: float = Field(
        300.0, gt=0, le=86_400, description="seconds after a signal to stop to end the step, save and leave"
    )
    agreement_freq: Whole = Field(
        10,
        ge=0,
        description="steps between two checks that all ranks computed the same advantages and that the engine holds "
        "the actor's weights, the first step included; 0 never",
    )
    logger: list[str] = Field(
        default=["console", "jsonl", "tensorboard"],
        description="where metrics go: console, jsonl, csv, tensorboard, prometheus, wandb, mlflow (see the section "
        "telemetry), or path/to/file.py:class",
    )
    project_name: str = Field("megarl", description="what several runs belong to: a folder, and a label of metrics")
    experiment_name: str = Field("run", description="the run's own name: its folder, and a label of metrics")
    default_local_dir: str = Field("", description="run folder; default runs/{project_name}/{experiment_name}")
    balance_batch: bool = Field(True, description="even out tokens over data-parallel ranks")
    deterministic: bool = Field(
        False,
        description="only kernels that add up in a fixed order, so that two runs, or one that was killed and resumed, "
        "have the same bits on the same GPUs; slower; not with rollout.name=vllm or an environment",
    )
    log_rollouts: Size = Field(
        8,
        ge=-1,
        description="sample rollouts written to the run folder at each step, of whole groups as far as they go; -1 "
        "writes all; unless 0, all of a validation are written",
    )

    @property
    def run_dir(self) -> str:
        return self.default_local_dir or f"runs/{self.project_name}/{self.experiment_name}"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


class CheckpointConfig(Section):
    """What a checkpoint holds beside what resuming needs."""

    save_hf: bool = Field(
        False,
        description="the actor, or what a reward_model run trains, as a Hugging Face folder, global_step_N/huggingface",
    )
    verify: bool = Field(True, description="compare every file with the checkpoint's manifest before it is loaded")

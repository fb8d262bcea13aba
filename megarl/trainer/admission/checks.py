"""Refuses a run that cannot work, before any rank starts: one line that says what to change."""

from __future__ import annotations

from megarl.config import Config
from megarl.config.refusal import is_refusal
from megarl.evaluation.folder import is_finished
from megarl.flow_kinds import check_format, flow_kind, generates, trains
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.families.of_user import use_family
from megarl.parallel.megatron_internals import check_megatron_core
from megarl.rewards import Reward
from megarl.rollout.kinds import engine_kind
from megarl.telemetry.sinks import SINKS
from megarl.trainer.admission.batches import (
    check_batches,
    check_carry_over,
    check_dynamic_sampling,
    check_optimization,
    check_samples,
)
from megarl.trainer.admission.deterministic import check_deterministic
from megarl.trainer.admission.environment import check_conversations, check_environment
from megarl.trainer.admission.models import check_export, check_model_files, check_shapes
from megarl.trainer.admission.other_models import check_other_files
from megarl.trainer.admission.rows import check_rows
from megarl.trainer.admission.telemetry import check_telemetry
from megarl.trainer.hub_models import fetch_models
from megarl.trainer.inputs import Inputs, read_inputs, read_model
from megarl.trainer.layouts import check_megatron, generation_layout, train_layout
from megarl.trainer.memory import check_memory
from megarl.trainer.needs import needs_of
from megarl.trainer.resuming.resume import expected_start
from megarl.trainer.run_folder import check_run_folder
from megarl.trainer.unread_keys import check_unread

LONGEST_LINE = 1000
"""Characters of a refusal."""


def check_run(config: Config, *, reward: Reward | None = None) -> Inputs:
    """Check everything that can be known without a process group; returns what was read on the way.

    Models of the Hugging Face Hub are fetched first; the configuration that is returned has their commits.

    Args:
        reward: scores responses, instead of the one that the configuration names.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    try:
        _check_configuration(config)
        check_megatron_core()
        config = fetch_models(config)
        inputs = read_inputs(config, reward=reward)
        check_shapes(config, inputs.arch)
        if trains(config):
            check_memory(config, inputs.arch)
        inputs = check_model_files(inputs)
        if generates(config):
            check_other_files(config, inputs.arch, needs_of(config))
        check_rows(inputs)
        if generates(config):
            check_conversations(inputs)
        if config.checkpoint.exports and config.trainer.save_freq != 0 and trains(config):
            inputs = check_export(inputs)
        check_run_folder(config.trainer, expected_start(inputs).folder)
    except ValueError as e:
        if not is_refusal(e):
            raise
        raise ValueError(_readable(str(e))) from e
    return inputs


def _readable(message: str) -> str:
    """Put a message on one line of readable length: names of files and columns, and libraries' texts, can be long."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"


def check_answering(config: Config) -> Inputs:
    """Check a model that answers any prompt, as `check_run` does, without data, rewards and folder.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    try:
        engine_kind(config.actor_rollout_ref.rollout.name)
        train_layout(config)
        generation_layout(config)
        check_megatron_core()
        inputs = read_model(fetch_models(config, alone=True))
        check_shapes(config, inputs.arch)
        inputs = check_model_files(inputs)
    except ValueError as e:
        if not is_refusal(e):
            raise
        raise ValueError(_readable(str(e))) from e
    return inputs


def check_layouts(config: Config) -> Architecture:
    """Check what needs nothing but the configuration and the models' config.json.

    Returns:
        the policy's architecture.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    _check_configuration(config)
    use_family(config.actor_rollout_ref.model.family)
    arch = read_architecture(config.actor_rollout_ref.model.folder)
    check_shapes(config, arch)
    return arch


def _check_configuration(config: Config) -> None:
    """Check keys that go together; those of generation and of policy updates only where the run has these."""
    check_format(config)
    check_deterministic(config)
    model = config.actor_rollout_ref.model
    if model.enable_gradient_checkpointing and model.recompute_modules:
        raise ValueError(
            "model.recompute_modules: model.enable_gradient_checkpointing recomputes all of a layer; leave either out"
        )
    if model.enable_activation_offload and not model.enable_gradient_checkpointing:
        raise ValueError(
            "model.enable_activation_offload is for what model.enable_gradient_checkpointing keeps; "
            "set that one to true"
        )
    if generates(config):
        engine_kind(config.actor_rollout_ref.rollout.name)
        check_samples(config)
        if trains(config):
            check_batches(config, needs_of(config))
            check_dynamic_sampling(config)
            check_carry_over(config)
        check_environment(config)
    else:
        needs_of(config)
    for name in config.trainer.logger:
        SINKS.check(name)
    check_telemetry(config)
    _check_profiler(config)
    train_layout(config)
    generation_layout(config)
    check_megatron(config.actor_rollout_ref.actor.megatron)
    if not trains(config):
        _check_evaluation(config)
        return
    check_unread(config)
    check_optimization(config)
    _check_best(config)
    if config.trainer.test_freq > 0 and flow_kind(config).validates and not config.data.val_files:
        raise ValueError(
            f"trainer.test_freq = {config.trainer.test_freq} validates on nothing: name held-out files in "
            "data.val_files, or set trainer.test_freq=-1"
        )


def _check_evaluation(config: Config) -> None:
    if not config.data.val_files:
        raise ValueError("an evaluation needs held-out prompts: name their files in data.val_files")
    if is_finished(config.trainer.run_dir):
        raise ValueError(f"{config.trainer.run_dir} holds an evaluation already; set another trainer.default_local_dir")


def _check_best(config: Config) -> None:
    trainer = config.trainer
    if not trainer.best_metric:
        return
    key = f"trainer.best_metric = {trainer.best_metric}"
    if trainer.save_freq == 0:
        raise ValueError(f"{key} keeps a checkpoint, and trainer.save_freq=0 saves none; set it to -1 or more steps")
    unvalidated = flow_kind(config).validates and not config.data.val_files
    if trainer.test_freq == 0 or unvalidated:
        what = "data.val_files" if unvalidated else "trainer.test_freq"
        raise ValueError(f"{key} is measured by validations, and there are none; set {what}")


def _check_profiler(config: Config) -> None:
    profiler, world = config.profiler, config.trainer.world_size
    if profiler.tool == "none":
        return
    if not profiler.steps or not profiler.ranks:
        missing = "ranks" if profiler.steps else "steps"
        raise ValueError(f"profiler.tool = {profiler.tool} records nothing: name profiler.{missing}, such as [3]")
    if profiler.ranks != "all" and max(profiler.ranks) >= world:
        raise ValueError(f"profiler.ranks: there is no rank {max(profiler.ranks)}, but ranks 0 to {world - 1}")

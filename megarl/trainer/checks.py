"""Refuses a run that cannot work, before any rank starts: one line that says what to change."""

from __future__ import annotations

from dataclasses import replace
from tempfile import TemporaryDirectory

import torch

from megarl.algorithms.declaration import Needs
from megarl.checkpoint.folder import check_whole
from megarl.checkpoint.huggingface_folder import check_weights, refuse_remote_code
from megarl.config import Config
from megarl.config.refusal import is_refusal
from megarl.config.reward import BY_MODEL
from megarl.data.prompts import PromptSet
from megarl.evaluation.folder import is_finished
from megarl.flow_kinds import check_format, flow_kind, generates, trains
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.parallel.megatron_internals import check_megatron_core
from megarl.rewards import Reward
from megarl.rewards.parts import refusal_of, scorers_of
from megarl.rollout.kinds import engine_kind
from megarl.telemetry.sinks import SINKS
from megarl.trainer.deterministic_checks import check_deterministic
from megarl.trainer.environment_checks import check_conversations, check_environment
from megarl.trainer.inputs import Inputs, read_inputs, read_model
from megarl.trainer.layouts import check_megatron, generation_layout, train_layout
from megarl.trainer.memory import check_memory
from megarl.trainer.needs import needs_of
from megarl.trainer.other_models import check_other_files, check_other_layouts
from megarl.trainer.resuming.model_files import write_exported_files
from megarl.trainer.resuming.resume import expected_start
from megarl.trainer.resuming.run_folder import check_run_folder
from megarl.trainer.telemetry_checks import check_telemetry
from megarl.trainer.unread_keys import check_unread

LONGEST_LINE = 1000
"""Characters of a refusal."""


def check_run(config: Config, *, reward: Reward | None = None) -> Inputs:
    """Everything that can be known without a process group; returns what was read on the way.

    Args:
        reward: scores responses, instead of the one that the configuration names.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    try:
        _check_configuration(config)
        check_megatron_core()
        inputs = read_inputs(config, reward=reward)
        _check_shapes(config, inputs.arch)
        if trains(config):
            check_memory(config, inputs.arch)
        _check_model_files(inputs)
        if generates(config):
            check_other_files(config, inputs.arch, needs_of(config))
        _check_rows(inputs)
        if generates(config):
            check_conversations(inputs)
        if config.checkpoint.save_hf and config.trainer.save_freq != 0 and trains(config):
            inputs = _check_export(inputs)
        check_run_folder(config.trainer, expected_start(inputs).folder)
    except ValueError as e:
        if not is_refusal(e):
            raise
        raise ValueError(_readable(str(e))) from e
    return inputs


def _readable(message: str) -> str:
    """One line of readable length: names of files and columns, and what libraries say, can have any."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"


def check_answering(config: Config) -> Inputs:
    """The part of `check_run` for a model that answers whatever it is asked: no data, no rewards, no folder.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    try:
        engine_kind(config.actor_rollout_ref.rollout.name)
        train_layout(config)
        generation_layout(config)
        check_megatron_core()
        inputs = read_model(config)
        _check_shapes(config, inputs.arch)
        _check_model_files(inputs)
    except ValueError as e:
        if not is_refusal(e):
            raise
        raise ValueError(_readable(str(e))) from e
    return inputs


def check_layouts(config: Config) -> Architecture:
    """The part of `check_run` that needs nothing but the configuration and the models' config.json.

    Returns:
        the policy's architecture.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    _check_configuration(config)
    arch = read_architecture(config.actor_rollout_ref.model.path)
    _check_shapes(config, arch)
    return arch


def _check_configuration(config: Config) -> None:
    """Keys that only generation or a policy update reads are not looked at where neither happens."""
    check_format(config)
    check_deterministic(config)
    if generates(config):
        engine_kind(config.actor_rollout_ref.rollout.name)
        _check_samples(config)
        if trains(config):
            _check_batches(config, needs_of(config))
            _check_dynamic_sampling(config)
            _check_carry_over(config)
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
    _check_optimization(config)
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


def _check_samples(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    sampling = rollout.val_kwargs
    if sampling.k and max(sampling.k) > sampling.n:
        raise ValueError(
            f"rollout.val_kwargs.k asks for {max(sampling.k)} samples per prompt, and rollout.val_kwargs.n = "
            f"{sampling.n} are drawn; raise n"
        )
    if sampling.n > 1 and sampling.temperature == 0:
        raise ValueError(
            f"rollout.val_kwargs.n = {sampling.n} greedy responses to a prompt are all the same; set "
            "rollout.val_kwargs.temperature, to 1 say"
        )


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


def _check_optimization(config: Config) -> None:
    actor, used = config.actor_rollout_ref.actor, {"actor.optim": config.actor_rollout_ref.actor.optim}
    if generates(config):
        used |= {"critic.optim": config.critic.optim, "warmup.optim": config.warmup.optim}
    for section, optim in used.items():
        if optim.min_lr > optim.lr:
            raise ValueError(f"{section}.min_lr = {optim.min_lr:g} is more than {section}.lr = {optim.lr:g}")
    if not generates(config):
        return
    low, high = actor.clip_low, actor.clip_high
    if max(low, high) > 100 * min(low, high):
        raise ValueError(
            f"actor.clip_ratio_low = {low:g} and actor.clip_ratio_high = {high:g} are more than a factor of 100 apart; "
            "they are distances from a ratio of 1, such as 0.2 and 0.28"
        )
    control = config.algorithm.kl_ctrl
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and not control.kl_coef:
        raise ValueError(
            "algorithm.kl_ctrl.type=adaptive multiplies algorithm.kl_ctrl.kl_coef step by step, and 0 stays 0; begin "
            "with more, such as 0.001, or set type=fixed"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        raise ValueError(
            "actor.kl_loss_type=k1 regularises nothing: the expected gradient of a loss with k1 is zero on-policy; "
            "use k2, k3, or k1+, which has its value and the gradient of k2"
        )


def _check_dynamic_sampling(config: Config) -> None:
    data, filtering, buffer = config.data, config.algorithm.filter_groups, config.reward.overlong_buffer
    if data.gen_batch_size is not None and not filtering.enable:
        raise ValueError(
            "data.gen_batch_size is the size of a draw with algorithm.filter_groups.enable=true; leave it off"
        )
    drawn = data.prompts_per_draw * filtering.max_num_gen_batches
    if filtering.enable and drawn < data.train_batch_size:
        raise ValueError(
            f"{filtering.max_num_gen_batches} draws of data.gen_batch_size = {data.gen_batch_size} prompts are fewer "
            f"than data.train_batch_size = {data.train_batch_size}; raise one of the two"
        )
    if config.environment.answers and BY_MODEL in config.reward.names and len(config.reward.names) > 1:
        raise ValueError(
            "reward.parts: of an episode functions read the end, a reward model all of it; have one of the two score"
        )
    if filtering.enable and config.reward.names == [BY_MODEL]:
        raise ValueError(
            "algorithm.filter_groups leaves out groups of equal scores, which a reward model does not give; "
            "set algorithm.filter_groups.enable=false"
        )
    if buffer.enable and not 0 < buffer.len < data.max_response_length:
        raise ValueError(
            f"reward.overlong_buffer.len = {buffer.len} must be between 1 and data.max_response_length - 1 = "
            f"{data.max_response_length - 1} tokens"
        )


def _check_carry_over(config: Config) -> None:
    carry_over, prompts = config.actor_rollout_ref.rollout.carry_over, config.data.train_batch_size
    if not carry_over.enable:
        return
    if not prompts < config.groups_under_way <= 2 * prompts:
        raise ValueError(
            f"rollout.carry_over.groups = {carry_over.groups} must be more than data.train_batch_size = {prompts} and "
            "at most twice as many: the next step must be able to train on all that a step leaves"
        )
    if config.algorithm.filter_groups.enable:
        raise ValueError(
            "algorithm.filter_groups draws prompts until enough groups differ, rollout.carry_over goes on until enough "
            "are finished; use one of the two"
        )
    if not config.algorithm.rollout_correction.corrects:
        raise ValueError(
            "rollout.carry_over trains on tokens that older weights have drawn; set "
            "algorithm.rollout_correction.rollout_is=token, which weighs by it"
        )


def _check_batches(config: Config, needs: Needs) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if prompts % mini:
        raise ValueError(f"data.train_batch_size = {prompts} is not a multiple of actor.ppo_mini_batch_size = {mini}")
    dp = train_layout(config).dp
    if mini * rollout.n % dp:
        raise ValueError(
            f"actor.ppo_mini_batch_size x rollout.n = {mini * rollout.n} sequences do not divide over {dp} "
            f"data-parallel ranks; make it a multiple of {dp}"
        )
    filtered = rollout.top_p < 1 or rollout.top_k > 0
    if filtered and config.algorithm.rollout_correction.rollout_is is None:
        raise ValueError(
            "rollout.top_p and rollout.top_k sample from another distribution than the training log-probabilities; "
            "set algorithm.rollout_correction.rollout_is=token, which weighs by it, or leave them off"
        )
    if rollout.n < needs.samples:
        name = config.algorithm.adv_estimator
        raise ValueError(
            f"rollout.n = {rollout.n} leaves nothing to compare within a group; use {needs.samples} or more with {name}"
        )
    if config.algorithm.filter_groups.enable and rollout.n == 1:
        raise ValueError("algorithm.filter_groups compares the responses to a prompt; set rollout.n to 2 or more")
    if config.trainer.critic_warmup and not needs.critic:
        raise ValueError(
            f"trainer.critic_warmup = {config.trainer.critic_warmup} trains only a critic, and "
            f"{config.algorithm.adv_estimator} has none; set it to 0"
        )
    if needs.critic and prompts % (size := config.critic_mini_batch_size):
        raise ValueError(f"data.train_batch_size = {prompts} is not a multiple of critic.ppo_mini_batch_size = {size}")


def _check_shapes(config: Config, arch: Architecture) -> None:
    """Whether the layouts can hold the models, the models the sequences, and the engine all of it."""
    layout, actor = train_layout(config), config.actor_rollout_ref.actor
    arch.check_training(
        tp=layout.tp,
        pp=layout.pp,
        chunks=layout.chunks,
        sequence_parallel=actor.megatron.sequence_parallel,
    )
    arch.check_generation(tp=generation_layout(config).tp)
    if generates(config):
        rollout = config.actor_rollout_ref.rollout
        engine_kind(rollout.name).check(rollout, arch, trains=trains(config))
    longest = config.data.max_sequence_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    if longest > arch.max_position_embeddings:
        raise ValueError(f"{what} is more than the model's {arch.max_position_embeddings} positions")
    _check_overrides(config, arch)
    if trains(config) and actor.use_dynamic_bsz and longest > actor.ppo_max_token_len_per_gpu:
        raise ValueError(f"{what} is more than actor.ppo_max_token_len_per_gpu = {actor.ppo_max_token_len_per_gpu}")
    if generates(config):
        check_other_layouts(config, arch, needs_of(config))


def _check_overrides(config: Config, arch: Architecture) -> None:
    model, megatron = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    if not megatron.override_transformer_config:
        return
    from megarl.models.overrides import check_overrides  # imports Megatron-Core, which takes seconds

    check_overrides(
        megatron.override_transformer_config,
        arch,
        train_layout(config),
        dtype=getattr(torch, model.dtype),
        sequence_parallel=megatron.sequence_parallel,
        recompute=model.enable_gradient_checkpointing,
    )


def _check_model_files(inputs: Inputs) -> None:
    """Engine, tokenizer and weights against the architecture."""
    arch, config = inputs.arch, inputs.config.actor_rollout_ref
    model, rollout = config.model, config.rollout
    try:
        refuse_remote_code(model.path)
    except ValueError as e:
        raise ValueError(f"actor_rollout_ref.model.path: {e}") from e
    if generates(inputs.config):
        engine_kind(rollout.name).check_here(rollout, arch, model.path, on_gpu=torch.cuda.is_available())
    if inputs.tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"the tokenizer has {inputs.tokenizer.vocab_size} tokens, the model's vocab_size is only {arch.vocab_size}"
        )
    scores = flow_kind(inputs.config).scores
    if model.checkpoint and scores:
        raise ValueError(
            "actor_rollout_ref.model.checkpoint: a reward model begins as a Hugging Face folder; set "
            "actor_rollout_ref.model.path to the checkpoint's huggingface/ (checkpoint.save_hf)"
        )
    if model.checkpoint:
        try:
            check_whole(model.checkpoint)
        except ValueError as e:
            raise ValueError(f"actor_rollout_ref.model.checkpoint: {e}") from e
    elif not model.random_init:
        try:
            check_weights(model.path, arch.with_scalar_output() if scores else arch)
        except ValueError as e:
            raise ValueError(f"actor_rollout_ref.model.path: {e} (random_init=true starts without weights)") from e


def _check_export(inputs: Inputs) -> Inputs:
    """Write what `huggingface/` will hold beside the weights: a save must not be the first to find that it cannot be
    read. Returns the inputs with what is said of it."""
    with TemporaryDirectory() as folder:
        try:
            remarks = write_exported_files(inputs, folder)
        except OSError as e:
            raise ValueError(f"checkpoint.save_hf: {e}; set it to false") from e
    return replace(inputs, remarks=(*inputs.remarks, *(f"remark: {remark}" for remark in remarks)))


def _check_rows(inputs: Inputs) -> None:
    """Enough rows, and responses to every one of them can be scored: not found out when it is drawn, hours later."""
    data, warmup = inputs.config.data, inputs.config.warmup
    if trains(inputs.config):
        _at_most("data.train_batch_size", data.train_batch_size, inputs.train_rows, "data.train_files")
        _at_most("data.gen_batch_size", data.prompts_per_draw, inputs.train_rows, "data.train_files")
    if not generates(inputs.config):
        _check_examples(inputs)
    elif warmup.total_training_steps:
        _at_most("warmup.train_batch_size", warmup.train_batch_size, len(inputs.demonstrations), "warmup.train_files")
    if inputs.rewards:
        _check_scoring(inputs)


def _check_scoring(inputs: Inputs) -> None:
    """Whether every row has a part that scores it, and is what its parts need."""
    asked, sources = scorers_of(inputs.rewards), set[str]()
    for prompts in (inputs.train_prompts, inputs.val_prompts):
        if isinstance(prompts, PromptSet) and prompts.checked_for == asked:  # as they were read
            sources |= prompts.sources
            continue
        for prompt in prompts:
            sources.add(prompt.data_source)
            if wrong := refusal_of(prompt.row, prompt.data_source, asked):
                raise ValueError(f"{prompt.source}: {wrong}")
    for part in inputs.rewards if trains(inputs.config) else ():  # held-out rows may be of fewer sources
        for source in part.data_sources:
            if source not in sources:
                known = ", ".join([*sorted(sources)[:8], *["..."] * (len(sources) > 8)])
                raise ValueError(
                    f"reward.parts.{part.label}.data_sources: no row has the data source {source!r}; there are {known}"
                )


def _check_examples(inputs: Inputs) -> None:
    """Whether every pair fits into a micro-batch, and what the flow asks of a batch."""
    config, actor = inputs.config, inputs.config.actor_rollout_ref.actor
    longest = max((*inputs.train_examples, *inputs.val_examples), key=lambda example: example.tokens)
    limit, together = actor.ppo_max_token_len_per_gpu, len(longest.sequences)
    if actor.use_dynamic_bsz and longest.tokens > limit:
        raise ValueError(
            f"{longest.source}: the pair has {longest.tokens} tokens, more than actor.ppo_max_token_len_per_gpu = "
            f"{limit}, and its two answers are compared within one micro-batch; raise the key"
        )
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu < together:
        raise ValueError("actor.ppo_micro_batch_size_per_gpu = 1 holds no pair; set it to 2 or more")
    if flow_kind(config).compares_prompts and 1 in (config.data.train_batch_size, len(inputs.val_examples)):
        raise ValueError(
            f"{config.trainer.flow} compares each answer with those to other prompts: data.train_batch_size, and the "
            "rows of data.val_files, must be 2 or more"
        )


def _at_most(key: str, size: int, there_are: int, files: str) -> None:
    if size > there_are:
        raise ValueError(f"{key} = {size} is more than the {there_are} rows of {files}")

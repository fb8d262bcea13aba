"""Builds the roles that a configuration asks for."""

from __future__ import annotations

from typing import TypeVar

from megarl.algorithms.loss import Loss, Sum
from megarl.algorithms.registry import LOSSES, build_loss
from megarl.algorithms.regularizers import Entropy, KlToReference
from megarl.checkpoint.foreign_weights import load_foreign_weights
from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.checkpoint.megatron_lm import is_megatron_lm, newest_iteration
from megarl.checkpoint.store import load_checkpoint, verify_checkpoint
from megarl.config import Config
from megarl.config.other_models import OtherModelConfig, RewardModelConfig, TeacherConfig
from megarl.config.policy import ModelConfig, OptimConfig
from megarl.data.curriculum import Columns, Order, as_asked, easy_first
from megarl.data.example_set import fits_of
from megarl.data.mixture import MixtureSampler
from megarl.data.prompt_sampler import Fits, PromptSampler
from megarl.data.prompts import PromptSet
from megarl.models.architecture import Architecture
from megarl.models.fill import Source, random_source
from megarl.parallel.train_groups import TrainGroups
from megarl.roles.frozen import FrozenModel, Judge, Policy, Reference, Teacher
from megarl.roles.model import MegatronModel
from megarl.roles.trained import Actor, Critic, RewardModel
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout
from megarl.trainer.other_models import architecture_of
from megarl.trainer.session.run import Run
from megarl.trainer.stopped import RunRefused


def build_actor(
    inputs: Inputs, groups: TrainGroups, *, optim: OptimConfig, total_steps: int, empty: bool = False
) -> Actor:
    """Build the actor with its first weights.

    Args:
        optim, total_steps: of its first optimizer.
        empty: all zero instead, since the run goes on from a checkpoint, which has them all.
    """
    config = inputs.config
    model = config.actor_rollout_ref.model

    def initial(policy: MegatronModel) -> None:
        if not empty:
            _load_policy(policy, inputs)

    settings = config.actor_rollout_ref.actor
    return Actor(
        inputs.arch,
        groups,
        model=model,
        megatron=settings.megatron,
        batching=settings,
        balance=config.trainer.balance_batch,
        optim=optim,
        total_steps=total_steps,
        initial=initial,
    )


def build_policy(inputs: Inputs, groups: TrainGroups) -> Policy:
    """Build the actor as it would begin, without gradients and optimizer.

    Where the engine shares its weights they stay on the GPU, whatever `param_offload` says.
    """
    roles, generation = inputs.config.actor_rollout_ref, generation_layout(inputs.config)
    shared = groups.layout.pp == 1 and groups.layout.tp == generation.tp
    offload = roles.actor.megatron.param_offload and not shared
    return Policy(
        inputs.arch,
        groups,
        model=roles.model,
        megatron=roles.actor.megatron.model_copy(update={"param_offload": offload}),
        batching=roles.actor,
        balance=inputs.config.trainer.balance_batch,
        initial=lambda policy: _load_policy(policy, inputs),
    )


def _load_policy(policy: MegatronModel, inputs: Inputs) -> None:
    model, world = inputs.config.actor_rollout_ref.model, policy.groups.world
    if not model.checkpoint:
        policy.load(_weights(model, inputs.arch, inputs.config.data.seed))
        return
    if is_megatron_lm(folder := newest_iteration(model.checkpoint)):
        try:
            policy.load_weights(load_foreign_weights(folder, policy.sharded_weights(), world))
        except ValueError as e:
            raise RunRefused(f"actor_rollout_ref.model.checkpoint: {e}") from e
        return
    if inputs.config.checkpoint.verify and (problem := verify_checkpoint(model.checkpoint, world)):
        raise RunRefused(
            f"actor_rollout_ref.model.checkpoint = '{model.checkpoint}' is damaged: {problem}; give another checkpoint"
        )
    try:
        weights = load_checkpoint(model.checkpoint, policy.sharded_weights(), rng=False, world=world)
    except ValueError as e:
        raise RunRefused(f"actor_rollout_ref.model.checkpoint: {e}") from e
    policy.load_weights(weights)


def build_reward_model(
    inputs: Inputs, groups: TrainGroups, *, optim: OptimConfig, total_steps: int, empty: bool = False
) -> RewardModel:
    """Build a reward model that begins as the language model, or the sequence classifier, of `actor_rollout_ref.model`.

    The other arguments are those of `build_actor`.
    """
    config = inputs.config
    model = config.actor_rollout_ref.model

    def initial(scorer: MegatronModel) -> None:
        if not empty:
            scorer.load(_weights(model, scorer.arch, config.data.seed))

    settings = config.actor_rollout_ref.actor
    return RewardModel(
        inputs.arch,
        groups,
        model=model,
        megatron=settings.megatron,
        batching=settings,
        balance=config.trainer.balance_batch,
        optim=optim,
        total_steps=total_steps,
        initial=initial,
    )


def build_reference(config: Config, actor: Actor) -> Reference:
    """Build a copy of the actor as it is now."""
    roles = config.actor_rollout_ref
    offload = roles.ref.megatron.param_offload
    return Reference(actor, model=roles.model, megatron=roles.actor.megatron, param_offload=offload)


def build_critic(run: Run, actor: Actor) -> Critic:
    """Build the critic with its first weights: those of `critic.model.path`, or the actor's as they are now. A head
    that is in neither is 0. All are 0 where the checkpoint that the run goes on from has them."""
    inputs, config = run.inputs, run.config
    settings, seed = config.critic, config.data.seed
    arch = architecture_of(settings.model, inputs.arch)

    def initial(critic: MegatronModel) -> None:
        if run.restores("critic"):
            return
        if settings.model.path or settings.model.random_init:
            critic.load(_weights(settings.model, arch, seed))
        else:
            critic.copy_from(actor)

    return Critic(
        arch,
        run.groups_of(settings.megatron),
        model=config.actor_rollout_ref.model,
        megatron=settings.megatron,
        batching=settings,
        balance=config.trainer.balance_batch,
        optim=settings.optim,
        total_steps=inputs.critic_steps,
        initial=initial,
    )


def build_teacher(run: Run) -> Teacher:
    """Build the teacher from its files."""
    return _frozen(Teacher, run, run.config.teacher)


def build_judge(run: Run) -> Judge:
    """Build the reward model from its files."""
    return _frozen(Judge, run, run.config.reward_model)


F = TypeVar("F", bound=FrozenModel)


def _frozen(kind: type[F], run: Run, settings: TeacherConfig | RewardModelConfig) -> F:
    config, arch = run.config, architecture_of(settings.model, run.inputs.arch)
    return kind(
        arch,
        run.groups_of(settings.megatron),
        model=config.actor_rollout_ref.model,
        megatron=settings.megatron,
        batching=settings,
        balance=config.trainer.balance_batch,
        initial=lambda model: model.load(_weights(settings.model, model.arch, config.data.seed)),
    )


def _weights(model: ModelConfig | OtherModelConfig, arch: Architecture, seed: int) -> Source:
    return random_source(arch, seed) if model.random_init else HuggingFaceWeights(model.folder, arch).box


def prompt_sampler(inputs: Inputs, *, fits: Fits | None = None) -> PromptSampler:
    """Build the sampler that draws the training prompts, or examples, in their order.

    Args:
        fits: which of some examples are not too long. Default: every rank finds it out of each.
    """
    data, allow, prompts = inputs.config.data, inputs.config.trainer.resume_allow, inputs.train_prompts
    if examples := inputs.train_examples:
        size = data.train_batch_size
        return PromptSampler(len(examples), size, data.shuffle, data.seed, allow=allow, fits=fits or fits_of(examples))
    size, order = data.prompts_per_draw, None
    called = {"batch_size": ("data.gen_batch_size", "batch")} if data.gen_batch_size else {}
    if isinstance(prompts, PromptSet):
        if data.weights:
            return MixtureSampler(
                prompts.sizes, data.weights, size, data.shuffle, data.seed, allow=allow, called=called
            )
        order = _order(data.curriculum, prompts)
    return PromptSampler(len(prompts), size, data.shuffle, data.seed, order=order, allow=allow, called=called)


def _order(curriculum: str, prompts: PromptSet) -> Order | None:
    if not curriculum:
        return None
    if ":" not in curriculum:
        return easy_first(prompts.difficulty)
    return as_asked(curriculum, Columns(lambda i: prompts.row(i).columns, len(prompts)))


def policy_loss(config: Config, *, reference: bool | None = None) -> Loss:
    """Return the loss that the configuration asks for, with entropy, and the KL to a reference where there is one.

    Args:
        reference: whether `Batch.ref_logp` will be there; None: as the keys ask for one.
    """
    actor = config.actor_rollout_ref.actor
    parts: list[Loss] = [
        build_loss(LOSSES, actor.policy_loss.loss_mode, actor),
        Entropy(coeff=actor.entropy_coeff),
    ]
    if config.needs_reference if reference is None else reference:
        parts.append(KlToReference(coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0, kind=actor.kl_loss_type))
    return Sum(*parts)

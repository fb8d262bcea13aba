"""Lists the models that a run has beside its policy. No Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.algorithms.declaration import Needs
from megarl.config import Config
from megarl.config.other_models import CriticConfig, OtherModelConfig, RewardModelConfig, TeacherConfig
from megarl.config.reward import BY_MODEL
from megarl.flow_kinds import generates
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.role_kinds import CRITIC, REWARD_MODEL, TEACHER, RoleKind
from megarl.trainer.digests import tokenizer_digest


@dataclass(frozen=True, kw_only=True)
class OtherRole:
    """Describes the role of a model beside the policy.

    Attributes:
        kind: its name is that of the configuration's section.
        mini_batch: prompts of an optimizer step; None: it is only read.
        epochs: passes over the sequences of a step in its update.
    """

    kind: RoleKind
    settings: CriticConfig | RewardModelConfig | TeacherConfig
    mini_batch: int | None = None
    epochs: int = 1


def other_roles(config: Config, needs: Needs) -> Iterator[OtherRole]:
    """Yield the models beside the policy in the order in which they are built. Only a run that generates has any."""
    if not generates(config):
        return
    if needs.critic:
        prompts, epochs = config.critic_mini_batch_size, config.critic.ppo_epochs
        yield OtherRole(kind=CRITIC, settings=config.critic, mini_batch=prompts, epochs=epochs)
    if needs.teacher:
        yield OtherRole(kind=TEACHER, settings=config.teacher)
    if BY_MODEL in config.reward.names:
        yield OtherRole(kind=REWARD_MODEL, settings=config.reward_model)


def architecture_of(model: OtherModelConfig, policy: Architecture) -> Architecture:
    """Return the architecture of the model's folder, or the policy's where it names none."""
    return read_architecture(model.folder) if model.path else policy


def own_tokenizer(config: Config) -> str | None:
    """Return the folder of the reward model's tokenizer, if it has one that is not the policy's."""
    model, policy = config.reward_model.model, config.actor_rollout_ref.model
    folder = model.tokenizer
    digest = tokenizer_digest(folder)
    has_one = digest != tokenizer_digest("")
    return folder if has_one and digest != tokenizer_digest(policy.tokenizer) else None

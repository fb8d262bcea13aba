"""The models beside the policy: which of them a run has, and whether it can. No Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.algorithms.declaration import Needs
from megarl.checkpoint.huggingface_folder import check_weights, refuse_remote_code, weight_entries
from megarl.config import Config
from megarl.config.other_models import CriticConfig, OtherModelConfig, RewardModelConfig, TeacherConfig
from megarl.config.policy import BatchingConfig, MegatronConfig
from megarl.config.reward import BY_MODEL
from megarl.flow_kinds import generates
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.tensors import SCORE
from megarl.role_kinds import CRITIC, REWARD_MODEL, TEACHER, RoleKind
from megarl.trainer.layouts import check_megatron, train_layout
from megarl.trainer.resuming.digests import tokenizer_digest


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A model beside the policy.

    Attributes:
        kind: whose name is the configuration's section.
    """

    kind: RoleKind
    settings: CriticConfig | RewardModelConfig | TeacherConfig

    @property
    def role(self) -> str:
        return self.kind.name

    @property
    def model(self) -> OtherModelConfig:
        return self.settings.model

    @property
    def megatron(self) -> MegatronConfig:
        return self.settings.megatron

    @property
    def batching(self) -> BatchingConfig:
        return self.settings


def beside_the_policy(config: Config, needs: Needs) -> Iterator[Beside]:
    """Those of a run that generates, in the order in which they are made; there are none in another."""
    if not generates(config):
        return
    if needs.critic:
        yield Beside(kind=CRITIC, settings=config.critic)
    if needs.teacher:
        yield Beside(kind=TEACHER, settings=config.teacher)
    if BY_MODEL in config.reward.names:
        yield Beside(kind=REWARD_MODEL, settings=config.reward_model)


def architecture_of(model: OtherModelConfig, policy: Architecture) -> Architecture:
    """Of its folder, or the policy's where it names none."""
    return read_architecture(model.path) if model.path else policy


def own_tokenizer(config: Config) -> str | None:
    """Where the reward model's tokenizer is, if it has one that is not the policy's."""
    theirs, ours = config.reward_model.model, config.actor_rollout_ref.model
    folder = theirs.tokenizer_path or theirs.path
    digest = tokenizer_digest(folder)
    has_one = digest != tokenizer_digest("")
    return folder if has_one and digest != tokenizer_digest(ours.tokenizer_path or ours.path) else None


def check_other_layouts(config: Config, policy: Architecture, needs: Needs) -> None:
    """Raises ValueError, with what to change, for a model whose keys or config.json do not let it be there, and for one
    that is named and would not be used."""
    used = {beside.role for beside in beside_the_policy(config, needs)}
    estimator = f"algorithm.adv_estimator = {config.algorithm.adv_estimator} needs none"
    others = {
        "critic": (config.critic.model, estimator),
        "teacher": (config.teacher.model, estimator),
        "reward_model": (
            config.reward_model.model,
            f"reward.name = {config.reward.name} scores; set reward.name=model",
        ),
    }
    for role, (model, why) in others.items():
        if model.path and role not in used:
            raise ValueError(f"{role}.model.path is set, but {why}")
    _check_each(config, needs, lambda beside: _check_layout(beside, config, policy))


def check_other_files(config: Config, policy: Architecture, needs: Needs) -> None:
    """The same for a model whose folder is not what its role needs: code of its own, no weights, another tokenizer."""
    _check_each(config, needs, lambda beside: _check_files(beside, config, policy))


def _check_each(config: Config, needs: Needs, check: Callable[[Beside], None]) -> None:
    for beside in beside_the_policy(config, needs):
        try:
            check(beside)
        except ValueError as e:
            raise ValueError(f"{beside.role}: {str(e).removeprefix('actor_rollout_ref.')}") from e


def _check_layout(beside: Beside, config: Config, policy: Architecture) -> None:
    model, megatron, batching = beside.model, beside.megatron, beside.batching
    if not (model.path or model.random_init or beside.role == "critic"):
        raise ValueError(f"set {beside.role}.model.path to the folder of its weights")
    arch = architecture_of(model, policy)
    if beside.role != "reward_model":
        _check_vocabulary(arch, policy)
    layout = train_layout(config, megatron)
    check_megatron(megatron)
    arch.check_training(tp=layout.tp, pp=layout.pp, chunks=layout.chunks, sequence_parallel=megatron.sequence_parallel)
    longest = config.data.max_sequence_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    if longest > arch.max_position_embeddings:
        raise ValueError(f"{what} is more than its {arch.max_position_embeddings} positions")
    if batching.use_dynamic_bsz and longest > batching.ppo_max_token_len_per_gpu:
        limit = f"{beside.role}.ppo_max_token_len_per_gpu = {batching.ppo_max_token_len_per_gpu}"
        raise ValueError(f"{what} is more than {limit}")


def _check_files(beside: Beside, config: Config, policy: Architecture) -> None:
    model, arch = beside.model, architecture_of(beside.model, policy)
    scores = beside.role == "reward_model"
    if scores and own_tokenizer(config) is None:
        _check_vocabulary(arch, policy)
    if model.path:
        refuse_remote_code(model.path)
        if not model.random_init:
            check_weights(model.path, arch.with_scalar_output() if beside.kind.scalar else arch)
            if scores and SCORE not in weight_entries(model.path):
                raise ValueError(f"'{model.path}' has no {SCORE}: a model that scores everything 0 is no reward model")


def _check_vocabulary(arch: Architecture, policy: Architecture) -> None:
    if arch.vocab_size != policy.vocab_size:
        raise ValueError(
            f"its vocabulary has {arch.vocab_size} tokens, the policy's {policy.vocab_size}; it must read the same ones"
        )

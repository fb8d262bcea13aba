"""Describes TRL's trainers: the flow that stands for each, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.migration.entry import Settings

A, OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"
M, R = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TRAINER = "trainer"
"""The setting that names a trainer: a command or a Python file sets it, no field of TRL's does."""
COMMAND_LINE = "command_line"
"""The setting that says that a Python file reads options, and that the user gave none."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Describes a trainer as in TRL 1.16, or in the last version that had it: 0.29 for PPO, ORPO and CPO.

    Attributes:
        flow: the flow of MegaRL that stands for it.
        lr: the default of its `learning_rate`.
        own_fields: fields of its configuration that no other trainer has.
        defaults: MegaRL keys that stand for the trainer and its further defaults, with their values.
    """

    flow: str
    lr: float
    own_fields: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        return self.flow == "ppo"


_PPO_FIELDS = frozenset((
    "num_ppo_epochs", "cliprange", "cliprange_value", "kl_coef", "kl_estimator", "reward_model_path",
    "sft_model_path", "response_length", "whiten_rewards", "vf_coef", "lam", "num_mini_batches",
    "missing_eos_penalty", "total_episodes", "local_rollout_forward_batch_size", "num_sample_generations",
    "stop_token",
))  # fmt: skip
_GRPO_FIELDS = frozenset((
    "num_generations", "max_completion_length", "use_vllm", "vllm_mode", "epsilon", "epsilon_high", "delta",
    "num_iterations", "scale_rewards", "reward_funcs", "reward_weights", "generation_batch_size", "temperature",
    "steps_per_generation", "mask_truncated_completions", "importance_sampling_level", "top_p", "top_k",
    "top_entropy_quantile", "entropy_coef", "use_bias_correction_kl",
))  # fmt: skip
TRAINERS: Mapping[str, Trainer] = {
    "ppo": Trainer(
        flow="ppo",
        lr=3e-6,
        own_fields=_PPO_FIELDS,
        defaults={
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.rollout.n": 1,
            "actor_rollout_ref.rollout.temperature": 0.7,
            "data.max_response_length": 53,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.05,
            "algorithm.lam": 0.95,
            f"{A}.ppo_epochs": 4,
            "critic.ppo_epochs": 4,
            "critic.cliprange_value": 0.2,
        },
    ),
    "rloo": Trainer(
        flow="ppo",
        lr=1e-6,
        own_fields=frozenset({"rloo_k", "normalize_advantages", "reward_clip_range"}),
        defaults={
            "algorithm.adv_estimator": "rloo",
            "actor_rollout_ref.rollout.n": 2,
            "data.max_response_length": 512,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.05,
            f"{A}.loss_agg_mode": "seq-mean-token-sum",
        },
    ),
    "grpo": Trainer(
        flow="ppo",
        lr=1e-6,
        own_fields=_GRPO_FIELDS,
        defaults={
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": 8,
            "data.max_response_length": 512,
        },
    ),
    "kto": Trainer(flow="kto", lr=1e-6, own_fields=frozenset({"desirable_weight", "undesirable_weight"})),
    "dpo": Trainer(
        flow="preference",
        lr=1e-6,
        own_fields=frozenset({"rpo_alpha", "precompute_ref_log_probs", "label_smoothing", "reference_free"}),
    ),
    "orpo": Trainer(flow="preference", lr=1e-6, defaults={"algorithm.preference.loss_mode": "orpo"}),
    "cpo": Trainer(flow="preference", lr=1e-6, own_fields=frozenset({"simpo_gamma", "cpo_alpha"})),
    "reward": Trainer(flow="reward_model", lr=1e-4, own_fields=frozenset({"center_rewards_coefficient"})),
    "sft": Trainer(flow="sft", lr=2e-5),
}
OTHERS = frozenset((
    "async", "bco", "dft", "distillation", "gkd", "gold", "hicra", "minillm", "nash", "online", "prm", "tpo", "xpo",
))  # fmt: skip
"""Words of the names of TRL's trainers and scripts that have no counterpart."""
POLICY_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""The values of GRPO's `loss_type`; other values are losses of pairs."""


def trainer_of(settings: Settings) -> str:
    """Name the trainer: the setting says it, else the fields tell it.

    Raises:
        ValueError: MegaRL has no counterpart of the trainer, or several trainers have these fields.
    """
    if (value := settings.of(TRAINER)) is not None:
        if not isinstance(value, str) or value not in TRAINERS:
            raise ValueError(f"TRL's trainer {value!r} has no counterpart here; those that have: {', '.join(TRAINERS)}")
        return value
    if settings.of("loss_type") in POLICY_LOSSES:
        return "grpo"
    name = next((name for name, trainer in TRAINERS.items() if trainer.own_fields & set(settings)), None)
    if name is None and "loss_type" in settings:
        return "dpo"
    if name is None and "beta" in settings:
        raise ValueError("of TRL's trainers GRPO, RLOO, DPO, ORPO and KTO have a beta: say which, trainer=dpo for one")
    return name or "sft"

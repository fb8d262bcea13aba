"""Lists methods that are a flow or several keys. What one key names is in `megarl.algorithms.registry`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.algorithms.bradley_terry import BradleyTerry
from megarl.algorithms.declaration import About, Needs, about_of
from megarl.algorithms.estimators.on_policy_distillation import on_policy_distillation
from megarl.algorithms.kto import kto


@dataclass(frozen=True, kw_only=True)
class Method:
    """Describes a kind of training, and the settings that select it.

    Attributes:
        what: one line for people.
        settings: what selects it, as the command line takes it: "trainer.flow=sft". FOLDER stands for a path, N for a
            number.
        about: its source, the keys that steer it, and what it needs.
    """

    what: str
    settings: tuple[str, ...]
    about: About


METHODS: Mapping[str, Method] = {
    "ppo": Method(
        what="Reinforcement learning, the default: responses are generated, scored and learnt from.",
        settings=("trainer.flow=ppo",),
        about=About(
            paper="PPO, arXiv 1707.06347, algorithm 1",
            keys=("algorithm.adv_estimator", "actor.policy_loss.loss_mode", "rollout.n", "reward.name"),
        ),
    ),
    "dapo": Method(
        what="GRPO with a higher upper clip, dynamic sampling, a loss over tokens, a soft penalty of long responses.",
        settings=(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "algorithm.filter_groups.enable=true",
            "reward.overlong_buffer.enable=true",
            "reward.overlong_buffer.len=N",
        ),
        about=About(
            paper="DAPO, arXiv 2503.14476",
            keys=(
                "actor.clip_ratio_low",
                "algorithm.filter_groups.max_num_gen_batches",
                "algorithm.overlong_filtering",
                "data.gen_batch_size",
                "reward.overlong_buffer.penalty_factor",
            ),
            needs=Needs(samples=2),
        ),
    ),
    "distillation": Method(
        what="A teacher's log-probabilities of the policy's own responses take the place of scores.",
        settings=("algorithm.adv_estimator=on_policy_distillation", "teacher.model.path=FOLDER"),
        about=about_of(on_policy_distillation),
    ),
    "tis": Method(
        what="Truncated importance sampling: tokens weigh by their probability in training over the engine's.",
        settings=("algorithm.rollout_correction.rollout_is=token",),
        about=About(
            paper="decoupled PPO, arXiv 2110.00641",
            keys=("algorithm.rollout_correction.rollout_is_threshold",),
        ),
    ),
    "warmup": Method(
        what="Supervised steps on demonstrations before the steps of reinforcement learning, in one run.",
        settings=("warmup.total_training_steps=N",),
        about=About(keys=("warmup.train_files", "warmup.train_batch_size", "warmup.optim.lr")),
    ),
    "sft": Method(
        what="Supervised training: cross-entropy on demonstrations or conversations.",
        settings=("trainer.flow=sft",),
        about=About(keys=("data.messages_key", "data.answer_key")),
    ),
    "preference": Method(
        what="Learning from pairs of answers, one of which is better: DPO, IPO, SimPO, ORPO.",
        settings=("trainer.flow=preference",),
        about=About(keys=("algorithm.preference.loss_mode",)),
    ),
    "kto": Method(
        what="Learning from single answers that are said to be good or bad, without pairs.",
        settings=("trainer.flow=kto",),
        about=about_of(kto),
    ),
    "reward_model": Method(
        what="Training of a model that scores answers, on pairs of which one is better.",
        settings=("trainer.flow=reward_model",),
        about=about_of(BradleyTerry),
    ),
    "eval": Method(
        what="Nothing is trained: held-out prompts are answered and scored (`megarl eval` does the same of a run).",
        settings=("trainer.flow=eval",),
        about=About(keys=("data.val_files", "rollout.val_kwargs.n")),
    ),
}
"""Name -> method, in the order in which they are listed."""

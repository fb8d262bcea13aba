"""Post-trains language models by reinforcement learning inside one Megatron program.

    import megarl

    megarl.train("run.yaml", reward=lambda response, row: float(response.strip() == row["answer"]))

Flows and scripts use the names in `__all__`. Python imports each of them at its first use: `import megarl` costs
nothing, and changes nothing in torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.algorithms.advantages import compute_advantages as compute_advantages
    from megarl.algorithms.aggregation import token_weights as token_weights
    from megarl.algorithms.bradley_terry import BradleyTerry as BradleyTerry
    from megarl.algorithms.cross_entropy import cross_entropy as cross_entropy
    from megarl.algorithms.declaration import Needs as Needs
    from megarl.algorithms.declaration import about as about
    from megarl.algorithms.group_scores import at_tokens as at_tokens
    from megarl.algorithms.group_scores import group_scores as group_scores
    from megarl.algorithms.kto import Kto as Kto
    from megarl.algorithms.loss import Loss as Loss
    from megarl.algorithms.loss import LossInput as LossInput
    from megarl.algorithms.loss import LossOutput as LossOutput
    from megarl.algorithms.loss import Metric as Metric
    from megarl.algorithms.loss import Sum as Sum
    from megarl.algorithms.losses.vanilla import PolicyClip as PolicyClip
    from megarl.algorithms.preferences.dpo import Dpo as Dpo
    from megarl.algorithms.preferences.ipo import Ipo as Ipo
    from megarl.algorithms.preferences.orpo import Orpo as Orpo
    from megarl.algorithms.preferences.simpo import Simpo as Simpo
    from megarl.algorithms.ratio import log_ratio as log_ratio
    from megarl.algorithms.ratio import policy_output as policy_output
    from megarl.algorithms.returns import value_targets as value_targets
    from megarl.algorithms.rollout_correction import correct_rollouts as correct_rollouts
    from megarl.algorithms.value_loss import ValueLoss as ValueLoss
    from megarl.api import train as train
    from megarl.config import Config as Config
    from megarl.config import ConfigError as ConfigError
    from megarl.config import build_config as build_config
    from megarl.config import load_config as load_config
    from megarl.data.example_batch import batch_of_examples as batch_of_examples
    from megarl.data.examples import Example as Example
    from megarl.environments.environment import Environment as Environment
    from megarl.environments.environment import Turn as Turn
    from megarl.flow_kinds import flow as flow
    from megarl.flows.learn import learn as learn
    from megarl.flows.ppo import ppo as ppo
    from megarl.flows.sft import sft as sft
    from megarl.hybrid.generation import Generation as Generation
    from megarl.phases import Item as Item
    from megarl.phases import Phase as Phase
    from megarl.role_kinds import RoleKind as RoleKind
    from megarl.roles.frozen import Judge as Judge
    from megarl.roles.frozen import Reference as Reference
    from megarl.roles.frozen import Teacher as Teacher
    from megarl.roles.trained import Actor as Actor
    from megarl.roles.trained import Critic as Critic
    from megarl.roles.trained import RewardModel as RewardModel
    from megarl.rollout.kinds import EngineKind as EngineKind
    from megarl.trainer.build import build_actor as build_actor
    from megarl.trainer.build import build_critic as build_critic
    from megarl.trainer.build import build_reference as build_reference
    from megarl.trainer.build import build_reward_model as build_reward_model
    from megarl.trainer.build import build_teacher as build_teacher
    from megarl.trainer.build import policy_loss as policy_loss
    from megarl.trainer.build import prompt_sampler as prompt_sampler
    from megarl.trainer.experience.collect import collect as collect
    from megarl.trainer.experience.evaluate import evaluate as evaluate
    from megarl.trainer.experience.scores import scorer as scorer
    from megarl.trainer.session.run import Run as Run
    from megarl.trainer.stopped import RunStopped as RunStopped
    from megarl.types import Batch as Batch
    from megarl.types import Completion as Completion
    from megarl.types import Prompt as Prompt
    from megarl.types import Rollout as Rollout
    from megarl.types import Rollouts as Rollouts
    from megarl.types import SamplingParams as SamplingParams
    from megarl.types import Tokens as Tokens
    from megarl.types import batch_of as batch_of

__version__ = "0.1.0"

_PLACES = {
    "Actor": "roles.trained",
    "Batch": "types",
    "BradleyTerry": "algorithms.bradley_terry",
    "Completion": "types",
    "Config": "config",
    "ConfigError": "config",
    "Critic": "roles.trained",
    "Dpo": "algorithms.preferences.dpo",
    "EngineKind": "rollout.kinds",
    "Environment": "environments.environment",
    "Example": "data.examples",
    "Generation": "hybrid.generation",
    "Ipo": "algorithms.preferences.ipo",
    "Item": "phases",
    "Judge": "roles.frozen",
    "Kto": "algorithms.kto",
    "Loss": "algorithms.loss",
    "LossInput": "algorithms.loss",
    "LossOutput": "algorithms.loss",
    "Metric": "algorithms.loss",
    "Needs": "algorithms.declaration",
    "Orpo": "algorithms.preferences.orpo",
    "Phase": "phases",
    "PolicyClip": "algorithms.losses.vanilla",
    "Prompt": "types",
    "Reference": "roles.frozen",
    "RewardModel": "roles.trained",
    "RoleKind": "role_kinds",
    "Rollout": "types",
    "Rollouts": "types",
    "Run": "trainer.session.run",
    "RunStopped": "trainer.stopped",
    "SamplingParams": "types",
    "Simpo": "algorithms.preferences.simpo",
    "Sum": "algorithms.loss",
    "Teacher": "roles.frozen",
    "Tokens": "types",
    "Turn": "environments.environment",
    "ValueLoss": "algorithms.value_loss",
    "about": "algorithms.declaration",
    "at_tokens": "algorithms.group_scores",
    "batch_of": "types",
    "batch_of_examples": "data.example_batch",
    "build_actor": "trainer.build",
    "build_config": "config",
    "build_critic": "trainer.build",
    "build_reference": "trainer.build",
    "build_reward_model": "trainer.build",
    "build_teacher": "trainer.build",
    "collect": "trainer.experience.collect",
    "compute_advantages": "algorithms.advantages",
    "correct_rollouts": "algorithms.rollout_correction",
    "cross_entropy": "algorithms.cross_entropy",
    "evaluate": "trainer.experience.evaluate",
    "flow": "flow_kinds",
    "group_scores": "algorithms.group_scores",
    "learn": "flows.learn",
    "load_config": "config",
    "log_ratio": "algorithms.ratio",
    "policy_loss": "trainer.build",
    "policy_output": "algorithms.ratio",
    "ppo": "flows.ppo",
    "prompt_sampler": "trainer.build",
    "scorer": "trainer.experience.scores",
    "sft": "flows.sft",
    "token_weights": "algorithms.aggregation",
    "train": "api",
    "value_targets": "algorithms.returns",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megarl.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""MegaRL: reinforcement-learning post-training of language models inside one Megatron program.

    import megarl

    megarl.train("run.yaml", reward=lambda response, row: float(response.strip() == row["answer"]))

What is listed in `__all__` is the face that flows and scripts are written against. It is imported when it is asked for:
`import megarl` costs nothing, and changes nothing in torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.algorithms.advantages import compute_advantages as compute_advantages
    from megarl.algorithms.aggregation import token_weights as token_weights
    from megarl.algorithms.cross_entropy import cross_entropy as cross_entropy
    from megarl.algorithms.declaration import Needs as Needs
    from megarl.algorithms.declaration import about as about
    from megarl.algorithms.loss import Loss as Loss
    from megarl.algorithms.loss import LossInput as LossInput
    from megarl.algorithms.loss import LossOutput as LossOutput
    from megarl.algorithms.loss import Metric as Metric
    from megarl.algorithms.loss import Sum as Sum
    from megarl.algorithms.losses.vanilla import PolicyClip as PolicyClip
    from megarl.api import train as train
    from megarl.config import Config as Config
    from megarl.config import ConfigError as ConfigError
    from megarl.config import build_config as build_config
    from megarl.config import load_config as load_config
    from megarl.environments.environment import Environment as Environment
    from megarl.environments.environment import Turn as Turn
    from megarl.flow_kinds import flow as flow
    from megarl.flows.ppo import ppo as ppo
    from megarl.flows.sft import sft as sft
    from megarl.hybrid.generation import Generation as Generation
    from megarl.phases import Item as Item
    from megarl.phases import Phase as Phase
    from megarl.role_kinds import RoleKind as RoleKind
    from megarl.roles.actor import Actor as Actor
    from megarl.roles.critic import Critic as Critic
    from megarl.roles.frozen import Judge as Judge
    from megarl.roles.frozen import Teacher as Teacher
    from megarl.roles.reference import Reference as Reference
    from megarl.roles.reward_model import RewardModel as RewardModel
    from megarl.rollout.kinds import EngineKind as EngineKind
    from megarl.trainer.build import build_actor as build_actor
    from megarl.trainer.build import build_reference as build_reference
    from megarl.trainer.build import policy_loss as policy_loss
    from megarl.trainer.build import prompt_sampler as prompt_sampler
    from megarl.trainer.experience.evaluate import evaluate as evaluate
    from megarl.trainer.session.run import Run as Run
    from megarl.trainer.stopped import RunStopped as RunStopped
    from megarl.types import Batch as Batch
    from megarl.types import Prompt as Prompt
    from megarl.types import Rollouts as Rollouts
    from megarl.types import SamplingParams as SamplingParams
    from megarl.types import batch_of as batch_of

__version__ = "0.1.0"

_PLACES = {
    "Actor": "roles.actor",
    "Batch": "types",
    "Config": "config",
    "ConfigError": "config",
    "Critic": "roles.critic",
    "EngineKind": "rollout.kinds",
    "Environment": "environments.environment",
    "Generation": "hybrid.generation",
    "Item": "phases",
    "Judge": "roles.frozen",
    "Loss": "algorithms.loss",
    "LossInput": "algorithms.loss",
    "LossOutput": "algorithms.loss",
    "Metric": "algorithms.loss",
    "Needs": "algorithms.declaration",
    "Phase": "phases",
    "PolicyClip": "algorithms.losses.vanilla",
    "Prompt": "types",
    "Reference": "roles.reference",
    "RewardModel": "roles.reward_model",
    "RoleKind": "role_kinds",
    "Rollouts": "types",
    "Run": "trainer.session.run",
    "RunStopped": "trainer.stopped",
    "SamplingParams": "types",
    "Sum": "algorithms.loss",
    "Teacher": "roles.frozen",
    "Turn": "environments.environment",
    "about": "algorithms.declaration",
    "batch_of": "types",
    "build_actor": "trainer.build",
    "build_config": "config",
    "build_reference": "trainer.build",
    "compute_advantages": "algorithms.advantages",
    "cross_entropy": "algorithms.cross_entropy",
    "evaluate": "trainer.experience.evaluate",
    "flow": "flow_kinds",
    "load_config": "config",
    "policy_loss": "trainer.build",
    "ppo": "flows.ppo",
    "prompt_sampler": "trainer.build",
    "sft": "flows.sft",
    "token_weights": "algorithms.aggregation",
    "train": "api",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megarl.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

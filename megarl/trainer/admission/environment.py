"""Checks environments and agents."""

from __future__ import annotations

from megarl.config import Config
from megarl.data.messages import are_messages
from megarl.data.readers import value_or_none
from megarl.environments.agent_process import check_agent
from megarl.environments.environment import environment_of
from megarl.environments.speech import Speech
from megarl.trainer.inputs import Inputs
from megarl.trainer.needs import needs_of

_LOOKED_AT = 64  # prompts, of any number


def check_environment(config: Config) -> None:
    """Check the keys of environment and agent; raises ValueError, in one line."""
    settings, limit = config.environment, config.data.max_response_length
    if not settings.answers:
        if config.reward.name == "environment":
            raise ValueError(
                "reward.name=environment leaves the score to an environment: set environment.name or .agent"
            )
        if settings.args:
            raise ValueError("environment.args are for an environment, and there is none; set environment.name")
        return
    if settings.name and settings.agent:
        raise ValueError("environment.name and environment.agent are two ways to answer the policy; use one of the two")
    if settings.name:
        environment_of(settings.name, settings.args)
    else:
        _check_agent(config)
    if config.actor_rollout_ref.rollout.carry_over.enable:
        raise ValueError(
            "rollout.carry_over interrupts responses, and an environment cannot wait for other weights: use one of "
            "the two"
        )
    if settings.name and settings.max_observation_length >= limit:
        raise ValueError(
            f"environment.max_observation_length = {settings.max_observation_length} leaves the policy nothing of "
            f"data.max_response_length = {limit} tokens, which observations count to; lower it, or raise the other"
        )
    if settings.timeout >= 60 * config.trainer.timeout_minutes:
        raise ValueError(
            f"environment.timeout = {settings.timeout:g} s is not less than trainer.timeout_minutes = "
            f"{config.trainer.timeout_minutes:g}, after which other ranks stop waiting; lower it"
        )


def _check_agent(config: Config) -> None:
    agent = config.environment.agent
    if config.environment.args:
        raise ValueError("environment.args are for environment.name; an agent gets its base_url and the row")
    check_agent(agent)
    if needs_of(config).greedy:
        raise ValueError(
            f"algorithm.adv_estimator = {config.algorithm.adv_estimator} compares with one greedy response to the same "
            "prompt, and an agent's conversations have prompts of their own; use another estimator"
        )


def check_conversations(inputs: Inputs) -> None:
    """Check that the tokenizer can write down what environments and agents say; raises ValueError, in one line."""
    config = inputs.config
    settings, key = config.environment, config.data.prompt_key
    if not settings.answers:
        return
    prompts = inputs.train_prompts
    some = (prompts[i] for i in range(0, len(prompts), max(1, len(prompts) // _LOOKED_AT)))
    chats = settings.agent or any(are_messages(value_or_none(prompt.row, key)) for prompt in some)
    if not chats:
        return
    speech = Speech(inputs.tokenizer, stop_tokens=inputs.stop_tokens, role=settings.role, limit=1)
    role = "user" if settings.agent else settings.role
    try:
        speech.messages([{"role": role, "content": "?"}], last=-1)
    except ValueError as e:
        what = "environment.agent" if settings.agent else f"environment.role = {role}"
        raise ValueError(f"{what}: {e}") from e

"""Scores responses: one verifier per file. Importing the package registers them."""

from megarl.rewards import (  # noqa: F401
    code,
    environment,
    exact_match,
    format,
    gsm8k,
    http,
    length,
    math_verify,
    multiple_choice,
    openai_judge,
    overlong,
    reasoning_gym,
    regex,
)
from megarl.rewards.registry import Reward, RewardFunction, load_reward, register

__all__ = ["Reward", "RewardFunction", "load_reward", "register"]

"""How responses are scored: one verifier per file. Importing the package registers them."""

from megarl.rewards import environment, exact_match, reasoning_gym  # noqa: F401
from megarl.rewards.registry import Reward, RewardFunction, load_reward, register

__all__ = ["Reward", "RewardFunction", "load_reward", "register"]

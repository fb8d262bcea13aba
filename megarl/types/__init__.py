"""Defines the values that travel between packages: prompts, completions, rollouts, batches."""

from megarl.types.batch import Batch, batch_of
from megarl.types.rollouts import Completion, Episode, FinishReason, Prompt, Rollout, Rollouts, SamplingParams
from megarl.types.routed_experts import RoutedExperts
from megarl.types.tokens import Outline, Tokens

__all__ = [
    "Batch",
    "Completion",
    "Episode",
    "FinishReason",
    "Outline",
    "Prompt",
    "Rollout",
    "Rollouts",
    "RoutedExperts",
    "SamplingParams",
    "Tokens",
    "batch_of",
]

"""Requests that no engine can serve."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.types import SamplingParams


def check_requests(
    prompts: Sequence[Sequence[int]], params: SamplingParams, *, max_model_len: int, vocab_size: int
) -> None:
    """Raises ValueError for the first request that cannot be served, with what to change."""
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give it at least one token (a BOS token, say)")
        if len(prompt) + params.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with max_tokens = {params.max_tokens} that exceeds "
                f"max_model_len = {max_model_len}: shorten it, or raise max_model_len"
            )
        # A rank looks up only its own rows, so such a token would silently count as a zero embedding.
        if max(prompt) >= vocab_size or min(prompt) < 0:
            raise ValueError(
                f"prompt {i} has token ids outside the model's vocabulary of {vocab_size}; "
                "use the model's own tokenizer"
            )

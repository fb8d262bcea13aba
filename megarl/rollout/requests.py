"""Refuses requests that no engine can serve."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.rollout.engine import Request


def check_requests(requests: Sequence[Request], *, max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError for the first request that cannot be served, with what to change."""
    for i, request in enumerate(requests):
        prompt, response, most = request.prompt, request.response, request.params.max_tokens
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give it at least one token (a BOS token, say)")
        if len(prompt) + most > max_model_len:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with max_tokens = {most} that exceeds "
                f"max_model_len = {max_model_len}: shorten it, or raise max_model_len"
            )
        if len(response) >= most:
            raise ValueError(f"prompt {i} has a response of {len(response)} tokens already, of {most} at most")
        # A rank looks up only its own rows, so such a token would silently count as a zero embedding.
        parts = (prompt, response.ids) if response else (prompt,)
        if max(map(max, parts)) >= vocab_size or min(map(min, parts)) < 0:
            raise ValueError(
                f"prompt {i} has token ids outside the model's vocabulary of {vocab_size}; "
                "use the model's own tokenizer"
            )

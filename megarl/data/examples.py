"""Prompt and reference answer as examples for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.config.schema import Data
from megarl.data.readers import require_column
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


class Example(NamedTuple):
    """Token ids of a prompt and of the response to learn, its end-of-sequence token included."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def make_examples(data: Data, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Example]:
    """One example per prompt: its row's `data.answer_key`, tokenised on its own, and the end-of-sequence token.

    Raises:
        ValueError: a row without an answer, or an answer over `data.max_response_length` tokens.
    """
    require_column([prompt.row for prompt in prompts], data.answer_key, "data.answer_key")
    examples = []
    for prompt in prompts:
        response = (*tokenizer.encode(str(prompt.row[data.answer_key])), tokenizer.eos_id)
        if len(response) > data.max_response_length:
            raise ValueError(
                f"row {prompt.index}: the answer in column '{data.answer_key}' has {len(response)} tokens with its "
                f"end token, more than data.max_response_length = {data.max_response_length}"
            )
        examples.append(Example(prompt.token_ids, response))
    return examples

"""Prompt and reference answer as examples for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.config.schema import Data
from megarl.data.prompts import encode_text
from megarl.data.readers import Row, require_column
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


class Example(NamedTuple):
    """Token ids of a prompt and of the response to learn, its end-of-sequence token included."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def make_examples(data: Data, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Example]:
    """One example per prompt: its row's `data.answer_key`, tokenised on its own, and the end-of-sequence token.

    Raises:
        ValueError: a row without an answer, an answer that is neither text nor a number, or one over
            `data.max_response_length` tokens.
    """
    require_column([Row(prompt.source, prompt.row) for prompt in prompts], data.answer_key, "data.answer_key")
    examples = []
    for prompt in prompts:
        answer = prompt.row[data.answer_key]
        if not isinstance(answer, str | int | float):  # str(None) would teach the model to say "None"
            raise ValueError(
                f"{prompt.source}: the answer in column '{data.answer_key}' must be text or a number, "
                f"not {'null' if answer is None else type(answer).__name__}"
            )
        response = (*encode_text(str(answer), prompt.source, tokenizer), tokenizer.eos_id)
        if len(response) > data.max_response_length:
            raise ValueError(
                f"{prompt.source}: the answer in column '{data.answer_key}' has {len(response)} tokens with its "
                f"end token, more than data.max_response_length = {data.max_response_length}"
            )
        examples.append(Example(prompt.token_ids, response))
    return examples

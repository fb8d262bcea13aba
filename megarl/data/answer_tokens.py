"""Tokenises answers that the data holds, to be learnt."""

from __future__ import annotations

import math

from megarl.config.data import DataConfig
from megarl.data.conversations import turns_of
from megarl.data.encode import TooLong, cut_prompt, encode_text, prompt_ids, prompt_of
from megarl.data.examples import Turns
from megarl.data.messages import are_messages
from megarl.data.readers import Row, require_column, value_at, value_or_none
from megarl.data.tokenizer import Tokenizer


def answered(row: Row, data: DataConfig, tokenizer: Tokenizer) -> Turns:
    """Tokenise a prompt and its answer: text; or messages behind those of the prompt, of which the assistant's are
    learnt, as in TRL's columns prompt and completion.

    Raises:
        ValueError: the row cannot be used, or (`TooLong`) has more tokens than the section allows.
    """
    key = data.answer_key
    answer = value_or_none(row.columns, key)
    if not are_messages(answer):
        return prompt_ids(row, data, tokenizer), answer_ids(row, key, "data.answer_key", data, tokenizer)
    prompt = prompt_of(row, data)
    if isinstance(prompt, str):
        raise ValueError(
            f"{row.source}: column '{key}' holds messages, so that column '{data.prompt_key}' (data.prompt_key) must "
            "hold the messages before them"
        )
    messages = [*prompt.messages, *answer]
    learnt = [i for i in range(len(prompt.messages), len(messages)) if messages[i]["role"] == "assistant"]
    if not learnt:
        raise ValueError(f"{row.source}: the messages in column '{key}' have none of the assistant")
    first, *rest = turns_of(messages, learnt, row.source, tokenizer, tools=prompt.tools)
    fitting_answer(tuple(token for turn in rest for token in turn), key, row.source, data)
    return (cut_prompt(first, row.source, data), *rest)


def answer_ids(row: Row, key: str, section_key: str, data: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenise the answer in a column, on its own and with the end-of-sequence token.

    Args:
        key: name of the column.
        section_key: the configuration key that names it, such as "data.answer_key".

    Raises:
        ValueError: no such column, an answer that is neither text nor a finite number, or one over
            `data.max_response_length` tokens (`TooLong`).
    """
    require_column([row], key, section_key)
    answer = value_at(row.columns, key)
    is_number = type(answer) is int or (type(answer) is float and math.isfinite(answer))
    if not (isinstance(answer, str) or is_number):  # str(None) would teach the model to say "None", str(True) "True"
        kind = f"{answer}" if isinstance(answer, float) else "null" if answer is None else type(answer).__name__
        raise ValueError(f"{row.source}: the answer in column '{key}' must be text or a number, not {kind}")
    return fitting_answer((*encode_text(str(answer), row.source, tokenizer), tokenizer.eos_id), key, row.source, data)


def fitting_answer(ids: tuple[int, ...], key: str, source: str, data: DataConfig) -> tuple[int, ...]:
    """Return the tokens of an answer; raises TooLong if it has more than `data.max_response_length` tokens."""
    if len(ids) > data.max_response_length:
        raise TooLong(
            f"{source}: the answer in column '{key}' has {len(ids)} tokens with its end token, more than "
            f"data.max_response_length = {data.max_response_length}"
        )
    return ids

"""Tokenises rows with a better and a worse answer to the same prompt."""

from __future__ import annotations

import math

from megarl.config.data import DataConfig
from megarl.data.answer_tokens import answer_ids, fitting_answer
from megarl.data.conversations import turns_of
from megarl.data.encode import cut_prompt, prompt_ids
from megarl.data.examples import Example, Turns
from megarl.data.messages import Messages, are_messages
from megarl.data.readers import Row, require_column, value_at, value_or_none
from megarl.data.tokenizer import Tokenizer
from megarl.data.tools import tools_of


def preference(row: Row, data: DataConfig, tokenizer: Tokenizer) -> Example:
    """Tokenise a pair of answers, the chosen one first, labelled with its margin (0 without `data.margin_key`).

    The answers are text behind the row's prompt; or conversations that differ in their last message alone, as
    UltraFeedback has them; or that message alone, behind a prompt that is a conversation.

    Raises:
        ValueError: the row cannot be used, or (`TooLong`) has more tokens than the section allows.
    """
    keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    for section_key, key in keys.items():
        require_column([row], key, section_key)
    margin = _margin(row, data.margin_key) if data.margin_key else 0.0
    if any(are_messages(value_at(row.columns, key)) for key in keys.values()):
        chosen, rejected = (_conversation(row, key, data, tokenizer) for key in keys.values())
        if chosen[0] != rejected[0]:
            raise ValueError(
                f"{row.source}: the conversations in columns '{data.chosen_key}' and '{data.rejected_key}' differ "
                f"before their last message"
            )
    else:
        prompt = prompt_ids(row, data, tokenizer)
        chosen, rejected = ((prompt, answer_ids(row, key, name, data, tokenizer)) for name, key in keys.items())
    return Example(sequences=(chosen, rejected), label=margin, source=row.source)


def _conversation(row: Row, key: str, data: DataConfig, tokenizer: Tokenizer) -> Turns:
    messages: Messages = value_at(row.columns, key)
    if not are_messages(messages) or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{row.source}: column '{key}' must hold a list of messages whose last is the assistant's, as the other "
            f"answer of the pair does"
        )
    if len(messages) == 1:
        if not are_messages(value_or_none(row.columns, data.prompt_key)):
            raise ValueError(
                f"{row.source}: column '{key}' holds the answer alone, so that column '{data.prompt_key}' "
                f"(data.prompt_key) must hold the messages before it"
            )
        messages = [*value_at(row.columns, data.prompt_key), *messages]
    prompt, answer = turns_of(messages, [len(messages) - 1], row.source, tokenizer, tools=tools_of(row, data.tools_key))
    return cut_prompt(prompt, row.source, data), fitting_answer(answer, key, row.source, data)


def _margin(row: Row, key: str) -> float:
    require_column([row], key, "data.margin_key")
    margin = value_at(row.columns, key)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"{row.source}: the margin in column '{key}' must be a finite number, not {margin!r:.40}")
    return float(margin)

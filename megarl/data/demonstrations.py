"""Reads rows with a prompt and its answer, which may have a label, or with a whole conversation."""

from __future__ import annotations

from megarl.config.data import DataConfig
from megarl.data.answer_tokens import answered
from megarl.data.conversations import turns_of
from megarl.data.encode import TooLong
from megarl.data.examples import Example
from megarl.data.messages import are_messages
from megarl.data.readers import Row, require_column, value_at
from megarl.data.tokenizer import Tokenizer
from megarl.data.tools import tools_of


def demonstration(row: Row, data: DataConfig, tokenizer: Tokenizer) -> Example:
    """Tokenise what is learnt of a row: its answer or, with `data.messages_key`, every message of the assistant.

    Raises:
        ValueError: the row cannot be used, or (`TooLong`) has more tokens than the section allows.
    """
    if data.messages_key:
        return _conversation(row, data, tokenizer)
    return Example(sequences=(answered(row, data, tokenizer),), source=row.source)


def _conversation(row: Row, data: DataConfig, tokenizer: Tokenizer) -> Example:
    key = data.messages_key
    require_column([row], key, "data.messages_key")
    messages = value_at(row.columns, key)
    if not are_messages(messages):
        raise ValueError(
            f"{row.source}: column '{key}' must hold a list of messages with role and content, "
            f"not {'null' if messages is None else type(messages).__name__}"
        )
    learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not learnt:
        raise ValueError(f"{row.source}: the conversation in column '{key}' has no message of the assistant")
    turns = turns_of(messages, learnt, row.source, tokenizer, tools=tools_of(row, data.tools_key))
    example = Example(sequences=(turns,), source=row.source)
    if example.tokens > data.max_sequence_length:
        raise TooLong(
            f"{row.source}: the conversation in column '{key}' has {example.tokens} tokens, more than "
            f"data.max_prompt_length + data.max_response_length = {data.max_sequence_length}"
        )
    return example


def judged(row: Row, data: DataConfig, tokenizer: Tokenizer) -> Example:
    """Tokenise an answer with the label 1 for desirable, 0 for not.

    Raises:
        ValueError: the row cannot be used, or (`TooLong`) has more tokens than the section allows.
    """
    require_column([row], data.label_key, "data.label_key")
    label = value_at(row.columns, data.label_key)
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise ValueError(
            f"{row.source}: the label in column '{data.label_key}' must be true, false, 1 or 0, not {label!r:.40}"
        )
    return Example(sequences=(answered(row, data, tokenizer),), label=float(label), source=row.source)

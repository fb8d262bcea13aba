"""Rows to tokenised prompts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from megarl.config.schema import Data
from megarl.data.readers import Row, read_rows, require_column
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt

_log = logging.getLogger(__name__)


class TooLong(ValueError):
    """Of a row that is dropped instead with `data.filter_overlong_prompts`."""


def load_prompts(
    data: Data, files: Sequence[str], tokenizer: Tokenizer, what: str = "data.train_files"
) -> list[Prompt]:
    """Read, tokenise and cut the prompts of some files; at most `data.max_prompt_length` tokens each.

    Args:
        data: column names, lengths and what happens to a prompt that is too long.
        files: data.train_files or data.val_files.
        what: which of the two, for messages.

    Raises:
        ValueError: unreadable files, a missing column, a prompt that is no text, empty or (truncation=error) too
            long, or no prompt left after filtering.
    """
    rows = read_rows(files, what)
    require_column(rows, data.prompt_key, "data.prompt_key")
    if data.answer_key != Data().answer_key:  # misspelt, another column called "answer" would be taken for it
        require_column(rows, data.answer_key, "data.answer_key")
    prompts = []
    for index, row in enumerate(rows):
        try:
            ids = prompt_ids(row, data, tokenizer)
        except TooLong:
            if not data.filter_overlong_prompts:
                raise
            continue
        columns, where = _with_answer(row.columns, data.answer_key), _data_source(row, data.source_key)
        prompts.append(Prompt(index=index, token_ids=ids, row=columns, source=row.source, data_source=where))
    limit = data.max_prompt_length
    if not prompts:
        raise ValueError(f"{what}: none of the {len(rows)} prompts has at most data.max_prompt_length = {limit} tokens")
    if len(prompts) < len(rows):
        _log.info("%s: %d of %d prompts dropped, over %d tokens", what, len(rows) - len(prompts), len(rows), limit)
    return prompts


def encode_text(text: str, source: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids; raises ValueError, naming the row, for text that cannot be tokenised."""
    try:
        text.encode()  # tokenizers do not say that half of a surrogate pair is what they cannot read
        return tokenizer.encode(text)
    except Exception as e:  # libraries raise what they like
        raise _refused(source, e) from e


def encode_messages(
    messages: Sequence[Mapping[str, str]], source: str, tokenizer: Tokenizer, *, reply: bool = True
) -> list[int]:
    """`Tokenizer.encode_chat`; raises ValueError, naming the row, where that fails."""
    try:
        return tokenizer.encode_chat(messages, reply=reply)
    except Exception as e:  # libraries raise what they like
        raise _refused(source, e) from e


def are_messages(value: object) -> bool:
    """Whether it is a list of messages with role and content."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    )


def prompt_ids(row: Row, data: Data, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of the row's prompt, cut as the section says; raises ValueError for one that cannot be used."""
    require_column([row], data.prompt_key, "data.prompt_key")
    value, key = row.columns[data.prompt_key], data.prompt_key
    if are_messages(value):
        ids = encode_messages(value, row.source, tokenizer)
    elif isinstance(value, str):
        ids = encode_text(value, row.source, tokenizer)
    else:
        raise ValueError(
            f"{row.source}: column '{key}' must hold text or a list of messages with role and content, "
            f"not {type(value).__name__}"
        )
    if not ids:
        raise ValueError(f"{row.source}: the prompt in column '{key}' is empty")
    return cut_prompt(ids, row.source, data)


def _refused(source: str, error: Exception) -> ValueError:
    kind = "" if isinstance(error, ValueError) else f"the tokenizer fails with {type(error).__name__}: "
    return ValueError(f"{source}: {kind}{' '.join(str(error).split())[:200]}")


def cut_prompt(ids: Sequence[int], source: str, data: Data) -> tuple[int, ...]:
    """At most `data.max_prompt_length` of a prompt's tokens; raises TooLong if none may be cut."""
    limit = data.max_prompt_length
    if len(ids) > limit:
        if data.filter_overlong_prompts or data.truncation == "error":
            raise TooLong(
                f"{source}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = {limit}; raise it, "
                "set data.truncation to left, right or middle, or set data.filter_overlong_prompts=true"
            )
        head = {"left": 0, "right": limit, "middle": limit // 2}[data.truncation]
        ids = [*ids[:head], *ids[len(ids) - (limit - head) :]]
    return tuple(ids)


def _data_source(row: Row, key: str) -> str:
    """What the column says, or else the file's name without its ending."""
    named = row.columns.get(key)
    if isinstance(named, str):
        return named
    return PurePath(re.sub(r"(:| row )\d+$", "", row.source)).stem


def _with_answer(columns: Mapping[str, Any], answer_key: str) -> Mapping[str, Any]:
    """Verifiers read the reference answer under 'answer', whatever its column is called."""
    return {**columns, "answer": columns[answer_key]} if answer_key in columns else columns

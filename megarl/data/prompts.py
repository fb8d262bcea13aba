"""Rows to tokenised prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megarl.config.schema import Data
from megarl.data.readers import Row, read_rows, require_column
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt

_log = logging.getLogger(__name__)


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
    limit = data.max_prompt_length
    prompts = []
    for index, row in enumerate(rows):
        ids = _encode(row[data.prompt_key], index, data.prompt_key, tokenizer)
        if len(ids) > limit:
            if data.filter_overlong_prompts:
                continue
            ids = _truncate(ids, index, data)
        prompts.append(Prompt(index=index, token_ids=tuple(ids), row=_with_answer(row, data.answer_key)))
    if not prompts:
        raise ValueError(f"{what}: none of the {len(rows)} prompts has at most data.max_prompt_length = {limit} tokens")
    if len(prompts) < len(rows):
        _log.info("%s: %d of %d prompts dropped, over %d tokens", what, len(rows) - len(prompts), len(rows), limit)
    return prompts


def _encode(text: object, index: int, key: str, tokenizer: Tokenizer) -> list[int]:
    if isinstance(text, list) and text and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in text):
        try:
            ids = tokenizer.encode_chat(text)
        except ValueError as e:
            raise ValueError(f"row {index}: {e}") from e
    elif isinstance(text, str):
        ids = tokenizer.encode(text)
    else:
        raise ValueError(
            f"row {index}: column '{key}' must hold text or a list of messages with role and content, "
            f"not {type(text).__name__}"
        )
    if not ids:
        raise ValueError(f"row {index}: the prompt in column '{key}' is empty")
    return ids


def _truncate(ids: list[int], index: int, data: Data) -> list[int]:
    limit = data.max_prompt_length
    if data.truncation == "left":
        return ids[-limit:]
    if data.truncation == "right":
        return ids[:limit]
    if data.truncation == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise ValueError(
        f"row {index}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = {limit}; raise it, set "
        "data.truncation to left, right or middle, or set data.filter_overlong_prompts=true"
    )


def _with_answer(row: Row, answer_key: str) -> Row:
    """Verifiers read the reference answer under 'answer', whatever its column is called."""
    return {**row, "answer": row[answer_key]} if answer_key in row else row

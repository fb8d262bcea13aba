"""A row's prompt as token ids, or why it cannot be one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.data import Data
from megarl.data.readers import Row, require_column, value_at
from megarl.data.tokenizer import Tokenizer


class TooLong(ValueError):
    """Of a row that is dropped instead with `data.filter_overlong_prompts`."""


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
    value = prompt_of(row, data.prompt_key)
    if isinstance(value, str):
        ids = encode_text(value, row.source, tokenizer)
    else:
        ids = encode_messages(value, row.source, tokenizer)
    return usable_ids(ids, row.source, data)


def prompt_of(row: Row, key: str) -> str | Sequence[Mapping[str, str]]:
    """The text or the messages in the prompt's column; raises ValueError where there are none."""
    require_column([row], key, "data.prompt_key")
    value = value_at(row.columns, key)
    if isinstance(value, str) or are_messages(value):
        return value
    raise ValueError(
        f"{row.source}: column '{key}' must hold text or a list of messages with role and content, "
        f"not {type(value).__name__}"
    )


def usable_ids(ids: Sequence[int], source: str, data: Data) -> tuple[int, ...]:
    """A prompt's tokens, cut as the section says; raises ValueError if there are none, or TooLong."""
    if not ids:
        raise ValueError(f"{source}: the prompt in column '{data.prompt_key}' is empty")
    return cut_prompt(ids, source, data)


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

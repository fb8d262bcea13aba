"""Reads messages, as OpenAI and Hugging Face write them, into the one form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]

_LOST = ("function_call", "audio")  # what would be left out of the text without a word


def are_messages(value: object) -> bool:
    """Tell whether a value is a list of messages and nothing else; `read_messages` says whether they can be read."""
    return isinstance(value, list) and len(value) > 0 and all(isinstance(m, dict) and "role" in m for m in value)


def read_messages(messages: Messages, source: str) -> list[Message]:
    """Read messages, with their texts as strings and a tool call's arguments as an object; such ones stay as they are.

    Parts of text are joined; content may be missing beside tool calls; fields that are null, as Parquet fills them in,
    and those that hold no text are left out.

    Args:
        source: of the row, for messages.

    Raises:
        ValueError: a message holds what is no text.
    """
    return [_message(message, f"{source}: message {i}") for i, message in enumerate(messages, start=1)]


def strings_in(value: object) -> Iterator[str]:
    """Yield every text in columns, messages or parts of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings_in(key)
            yield from strings_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings_in(inner)


def without_nulls(value: Any) -> Any:
    """Leave out the fields of objects that are null, as tables fill them in."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _message(message: Mapping[str, Any], place: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and role and isinstance(role, str) and isinstance(content, str):
        return {"role": role, "content": content}
    given = {key: value for key, value in message.items() if value is not None}
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}: its role must be a name such as user, not {_kind(message.get('role'))}")
    for key in _LOST:
        if given.get(key):
            raise ValueError(f"{place}: {key} cannot be read; write calls as tool_calls, and all else as text")
    calls = given.get("tool_calls") or []
    read: Message = {"role": role, "content": _content(given.get("content"), place, may_be_missing=bool(calls))}
    read |= {key: value for key, value in given.items() if key not in read and isinstance(value, str)}
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"{place}: tool_calls must be a list, not {_kind(calls)}")
        read["tool_calls"] = [_tool_call(call, f"{place}: tool call {i}") for i, call in enumerate(calls, start=1)]
    return read


def _content(content: object, place: str, *, may_be_missing: bool) -> str:
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list) and content:
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, Mapping) else None
                raise ValueError(
                    f"{place}: only parts of text can be read, not {f'{kind!r:.40}' if kind else _kind(part)}"
                )
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{place}: its content must be text, or a list of parts of text, not {_kind(content)}")
    return content


def _tool_call(call: object, place: str) -> Message:
    """Bring a call into Hugging Face's form; OpenAI writes the arguments as JSON, some leave the inner object out."""
    given = {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = given.pop("function", None) if "function" in given else given
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"{place} has no function with a name")
    assert isinstance(function, Mapping)
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{place}: its arguments are no JSON: {e!s:.80}") from e
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place}: its arguments must be an object, or one as JSON, not {_kind(arguments)}")
    texts = {key: value for key, value in given.items() if key in ("id", "type") and isinstance(value, str)}
    return {"type": "function", **texts, "function": {"name": name, "arguments": dict(arguments)}}


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__

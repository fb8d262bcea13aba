"""Tokenises a row's prompt, or says why it cannot be used. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.config.data import DataConfig
from megarl.data.messages import Message, Messages, are_messages, read_messages
from megarl.data.readers import Row, require_column, value_at
from megarl.data.tokenizer import Tokenizer
from megarl.data.tools import tools_of

USUAL_ROLES = ("system", "user", "assistant")


class Conversation(NamedTuple):
    """Holds a prompt for the chat template: messages, and the tools that its row offers."""

    messages: list[Message]
    tools: list[Message]


class TooLong(ValueError):
    """Raised for a row that is too long; `data.filter_overlong_prompts` drops it instead."""


def encode_text(text: str, source: str, tokenizer: Tokenizer) -> list[int]:
    """Tokenise a text; raises ValueError, naming the row, for text that cannot be tokenised."""
    try:
        return tokenizer.encode(text)
    except Exception as e:  # libraries raise what they like
        raise _refused(source, e) from e


def encode_prompt(prompt: str | Conversation, source: str, tokenizer: Tokenizer) -> list[int]:
    """Tokenise what `prompt_of` gives; raises ValueError, naming the row, where that fails."""
    if isinstance(prompt, str):
        return encode_text(prompt, source, tokenizer)
    return encode_messages(prompt.messages, source, tokenizer, tools=prompt.tools)


def encode_messages(
    messages: Messages, source: str, tokenizer: Tokenizer, *, reply: bool = True, tools: Messages = ()
) -> list[int]:
    """Call `Tokenizer.encode_chat`; raises ValueError, naming the row, where it fails or would leave something out."""
    read = read_messages(messages, source)
    try:
        check_nothing_is_left_out(read, tokenizer, reply=reply, tools=tools)
        return tokenizer.encode_chat(read, reply=reply, tools=tools)
    except Exception as e:  # libraries raise what they like
        raise _refused(source, e) from e


def check_nothing_is_left_out(
    messages: Messages, tokenizer: Tokenizer, *, reply: bool = True, tools: Messages = ()
) -> None:
    """Raise ValueError where the template drops tools, tool calls, or messages of other roles than the usual three.

    A template may not know tools: one for chats writes a tool call as nothing, and the model would learn to answer
    nothing. So probe words are put in place of what the messages hold, and are looked for in the template's text.
    """
    if not tools and all(message["role"] in USUAL_ROLES and "tool_calls" not in message for message in messages):
        return
    probes: dict[str, str] = {}

    def probe(what: str) -> str:
        probes[f"megarlprobe{len(probes)}x"] = what
        return f"megarlprobe{len(probes) - 1}x"

    probed = []
    for i, message in enumerate(messages, start=1):
        calls = message.get("tool_calls")
        if calls or message["role"] not in USUAL_ROLES:
            message = dict(message)
            if message["content"]:
                message["content"] = probe(f"the content of message {i} ({message['role']})")
            if calls:
                message["tool_calls"] = [_probed(call, probe, f"the tool calls of message {i}") for call in calls]
        probed.append(message)
    offered = [{**tool, "function": {**tool["function"], "name": probe("the tools")}} for tool in tools]
    text = tokenizer.chat_text(probed, reply=reply, tools=offered) if probes else ""
    lost = next((what for word, what in probes.items() if word not in text), "")
    if lost:
        raise ValueError(
            f"the chat template does not write down {lost}, which would be lost; say it in the text of a message, or "
            "use a chat template that reads it"
        )


def _probed(call: Message, probe: Callable[[str], str], what: str) -> Message:
    arguments = {probe(what): probe(what) for _ in call["function"]["arguments"]}
    return {**call, "function": {"name": probe(what), "arguments": arguments}}


def prompt_ids(row: Row, data: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenise the row's prompt, cut as the section says; raises ValueError for one that cannot be used."""
    return usable_ids(encode_prompt(prompt_of(row, data), row.source, tokenizer), row.source, data)


def prompt_of(row: Row, data: DataConfig) -> str | Conversation:
    """Return the text or the messages in the prompt's column; raises ValueError where there are none."""
    key = data.prompt_key
    require_column([row], key, "data.prompt_key")
    value, tools = value_at(row.columns, key), tools_of(row, data.tools_key)
    if isinstance(value, str):
        if tools:
            raise ValueError(
                f"{row.source}: tools need a prompt of messages, and column '{key}' holds text; if column "
                f"'{data.tools_key}' is not for the chat template, set data.tools_key="
            )
        return value
    if are_messages(value):
        return Conversation(read_messages(value, row.source), tools)
    raise ValueError(
        f"{row.source}: column '{key}' must hold text or a list of messages with role and content, "
        f"not {type(value).__name__}"
    )


def usable_ids(ids: Sequence[int], source: str, data: DataConfig) -> tuple[int, ...]:
    """Cut a prompt's tokens as the section says; raises ValueError if there are none, or TooLong."""
    if not ids:
        raise ValueError(f"{source}: the prompt in column '{data.prompt_key}' is empty")
    return cut_prompt(ids, source, data)


def special_remark(what: str, rows: int, seen: int, data: DataConfig) -> tuple[str, ...]:
    """Write the remark on rows whose texts spell special tokens, for the start of the run; empty if there are none."""
    if not rows:
        return ()
    become = "become these tokens" if data.read_special_tokens else "stay text, unless data.read_special_tokens=true"
    return (f"remark: {what}: {rows} of {seen} rows spell special tokens of the tokenizer, which {become}",)


def _refused(source: str, error: Exception) -> ValueError:
    kind = "" if isinstance(error, ValueError) else f"the tokenizer fails with {type(error).__name__}: "
    return ValueError(f"{source}: {kind}{' '.join(str(error).split())[:200]}")


def cut_prompt(ids: Sequence[int], source: str, data: DataConfig) -> tuple[int, ...]:
    """Keep at most `data.max_prompt_length` of a prompt's tokens; raises TooLong if none may be cut."""
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

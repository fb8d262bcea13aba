"""Writes replies of the policy as OpenAI's clients read them: whole, or as a stream of events."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.messages import Message
from megarl.environments.chat_request import ChatRequest

MODEL = "policy"
"""The endpoint's name for the model; a request may name any."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """Holds a reply of the policy.

    Attributes:
        number: tells the replies of an episode apart.
        message: of the assistant, in OpenAI's form.
        cut_off: whether the reply ended at a limit of tokens.
        prompt_tokens, reply_tokens: their counts.
        tokens: text and log-probability of each drawn token, if the client wants them.
    """

    number: str
    message: Message
    cut_off: bool
    prompt_tokens: int
    reply_tokens: int
    tokens: Sequence[tuple[str, float]] | None = None


def reply_message(text: str, request: ChatRequest, number: str) -> Message:
    """Make the assistant's message; with tools, calls in <tool_call> tags (Hermes, Qwen) become `tool_calls`."""
    cut = min((place for stop in request.stop if (place := text.find(stop)) >= 0), default=len(text))
    text = text[:cut]
    calls = _calls_in(text, number) if request.reads_calls else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip(), "tool_calls": calls}


def _calls_in(text: str, number: str) -> list[Message]:
    calls: list[Message] = []
    for match in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, RecursionError):  # a policy says "[[[[" as often as it likes
            return []
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return []
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
    return calls


def completion_body(replies: Sequence[ChatReply]) -> dict[str, Any]:
    """Write the answer to a request for chat completions."""
    choices = [
        {"index": i, "message": reply.message, "finish_reason": _reason(reply), "logprobs": _logprobs(reply)}
        for i, reply in enumerate(replies)
    ]
    return {**_head(replies, "chat.completion"), "choices": choices, "usage": _usage(replies)}


def completion_events(replies: Sequence[ChatReply], request: ChatRequest) -> Iterator[str]:
    """Write server-sent events: each reply, its end, the tokens' counts if the client wants them, and the end."""
    head = _head(replies, "chat.completion.chunk")
    for i, reply in enumerate(replies):
        delta = dict(reply.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": _logprobs(reply)}
        yield event({**head, "choices": [choice]})
        yield event({**head, "choices": [{"index": i, "delta": {}, "finish_reason": _reason(reply), "logprobs": None}]})
    if request.usage:
        yield event({**head, "choices": [], "usage": _usage(replies)})
    yield "data: [DONE]\n\n"


def event(content: dict[str, Any], name: str = "") -> str:
    """Write a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content)}\n\n"


def _head(replies: Sequence[ChatReply], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{replies[0].number}", "object": kind, "created": int(time.time()), "model": MODEL}


def _reason(reply: ChatReply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else "length" if reply.cut_off else "stop"


def _usage(replies: Sequence[ChatReply]) -> dict[str, int]:
    prompt, drawn = replies[0].prompt_tokens, sum(reply.reply_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def _logprobs(reply: ChatReply) -> dict[str, Any] | None:
    if reply.tokens is None:
        return None
    content = [
        {"token": token, "logprob": logp, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logp in reply.tokens
    ]
    return {"content": content, "refusal": None}

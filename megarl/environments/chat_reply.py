"""A reply of the policy as OpenAI's clients read it: whole, or as a stream of events."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.messages import Message
from megarl.environments.chat_request import Asked

MODEL = "policy"
"""What the endpoint calls the model; a request may call it anything."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Said:
    """A reply.

    Attributes:
        number: tells the replies of an episode apart.
        message: of the assistant, in OpenAI's form.
        cut_off: whether it ended at a limit of tokens.
        prompt, reply: tokens.
        tokens: text and log-probability of each that was drawn, if they are wanted.
    """

    number: str
    message: Message
    cut_off: bool
    prompt: int
    reply: int
    tokens: Sequence[tuple[str, float]] | None = None


def reply_message(text: str, asked: Asked, number: str) -> Message:
    """The assistant's message; with tools, calls in <tool_call> tags (Hermes, Qwen) become `tool_calls`."""
    cut = min((place for stop in asked.stop if (place := text.find(stop)) >= 0), default=len(text))
    text = text[:cut]
    calls = _calls_in(text, number) if asked.reads_calls else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip(), "tool_calls": calls}


def _calls_in(text: str, number: str) -> list[Message]:
    calls: list[Message] = []
    for found in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(found.group(1))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, RecursionError):  # a policy says "[[[[" as often as it likes
            return []
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return []
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
    return calls


def completion_body(replies: Sequence[Said]) -> dict[str, Any]:
    """The answer to a request for chat completions."""
    choices = [
        {"index": i, "message": said.message, "finish_reason": _reason(said), "logprobs": _logprobs(said)}
        for i, said in enumerate(replies)
    ]
    return {**_head(replies, "chat.completion"), "choices": choices, "usage": _usage(replies)}


def completion_events(replies: Sequence[Said], asked: Asked) -> Iterator[str]:
    """The same as server-sent events: each reply, its end, the tokens' counts if they are wanted, and the end."""
    head = _head(replies, "chat.completion.chunk")
    for i, said in enumerate(replies):
        delta = dict(said.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": _logprobs(said)}
        yield event({**head, "choices": [choice]})
        yield event({**head, "choices": [{"index": i, "delta": {}, "finish_reason": _reason(said), "logprobs": None}]})
    if asked.usage:
        yield event({**head, "choices": [], "usage": _usage(replies)})
    yield "data: [DONE]\n\n"


def event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content)}\n\n"


def _head(replies: Sequence[Said], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{replies[0].number}", "object": kind, "created": int(time.time()), "model": MODEL}


def _reason(said: Said) -> str:
    return "tool_calls" if said.message.get("tool_calls") else "length" if said.cut_off else "stop"


def _usage(replies: Sequence[Said]) -> dict[str, int]:
    prompt, reply = replies[0].prompt, sum(said.reply for said in replies)
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _logprobs(said: Said) -> dict[str, Any] | None:
    if said.tokens is None:
        return None
    content = [
        {"token": token, "logprob": logp, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logp in said.tokens
    ]
    return {"content": content, "refusal": None}

"""A request for a chat completion, as OpenAI's clients send it: read, checked, and answered in their form."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.types import SamplingParams

MODEL = "policy"
"""What the endpoint calls the model; a request may call it anything."""

Message = dict[str, Any]

_IGNORED = ("model", "messages", "tools", "user", "metadata", "store", "parallel_tool_calls", "service_tier",
            "safety_identifier", "prompt_cache_key", "stream_options")  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
}
_SAYS: Mapping[str, str] = {
    "stream": "answers come in one piece: leave it out",
    "n": "an episode samples one response at a time: leave it out",
}
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Refused(ValueError):
    """A request that is not served.

    Attributes:
        param: the parameter that is wrong.
        code: OpenAI's word for what is wrong, if it has one.
        status: of HTTP.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that can be served.

    Attributes:
        messages: as the chat template reads them.
        tools: JSON schemas.
        max_tokens: of the reply; None: as many as there is room for.
        stop: strings that end it, and are no part of its text.
        seed: of the client; None: none.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


def read_request(body: object, *drawn: SamplingParams) -> Asked:
    """What a request asks for.

    Args:
        drawn: how the run draws tokens, now and in training: what a request may say about it.

    Raises:
        Refused: a parameter that would change how tokens are drawn, or that cannot be read.
    """
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    _check_parameters(body, drawn)
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(not isinstance(limit, int) or isinstance(limit, bool) or limit < 1 for limit in limits):
        raise Refused("max_tokens must be a whole number from 1 on", param="max_tokens")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused("stop must be a string or a list of strings, none of them empty", param="stop")
    try:
        "".join(stop).encode()
    except UnicodeEncodeError as e:  # half of a surrogate pair, which the engine would find out for the whole run
        raise Refused(f"stop: {e}", param="stop") from e
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise Refused("seed must be a whole number", param="seed")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of one message or more", param="messages")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools must be a list of JSON schemas", param="tools")
    return Asked(
        messages=tuple(_message(message, i) for i, message in enumerate(messages)),
        tools=tuple(tools),
        max_tokens=min(limits) if limits else None,
        stop=tuple(stop),
        seed=seed,
    )


def _check_parameters(body: Mapping[str, Any], drawn: Sequence[SamplingParams]) -> None:
    refused = []
    for name, value in body.items():
        if value is None or name in _IGNORED or name in ("max_tokens", "max_completion_tokens", "stop", "seed"):
            continue
        if name in ("temperature", "top_p", "top_k"):
            known = [getattr(params, name) for params in drawn]
            if value not in known:
                raise Refused(
                    f"{name} = {value!r}: the run draws tokens with {name} = {known[0]:g}, and trains on what it drew; "
                    f"leave {name} out",
                    param=name,
                )
        elif name not in _NEUTRAL or value not in _NEUTRAL[name]:
            refused.append(name)
    if refused:
        why = _SAYS.get(refused[0], "it would change how tokens are drawn, or is not known: leave it out")
        raise Refused(f"{', '.join(refused)}: {why}", param=refused[0], code="unsupported_parameter")


def _message(message: object, place: int) -> Message:
    """With its content as text, and a tool call's arguments as an object, as chat templates read them."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"messages[{place}] must be an object with a role", param="messages")
    read = {key: value for key, value in message.items() if value is not None}
    content = read.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(f"messages[{place}]: only text can be read", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(f"messages[{place}]: content must be text", param="messages")
    read["content"] = content
    if calls := read.get("tool_calls"):
        try:
            read["tool_calls"] = [_tool_call(call) for call in calls]
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise Refused(f"messages[{place}]: tool_calls cannot be read", param="messages") from e
    return read


def _tool_call(call: Any) -> Message:
    arguments = call["function"]["arguments"]
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": read}}


def same_message(one: Message, other: Message) -> bool:
    """Whether they say the same; clients change what is beside that, and leave empty fields out."""
    return _said(one) == _said(other)


def _said(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], calls


def sampling(params: SamplingParams, asked: Asked, begun: int) -> SamplingParams:
    """How a reply is drawn whose conversation has so many tokens after the prompt."""
    most = params.max_tokens if asked.max_tokens is None else min(params.max_tokens, begun + asked.max_tokens)
    return replace(params, max_tokens=most, stop=(*params.stop, *(s for s in asked.stop if s not in params.stop)))


def reply_message(text: str, asked: Asked, number: str) -> Message:
    """The assistant's message; with tools, calls in <tool_call> tags (Hermes, Qwen) become `tool_calls`."""
    cut = min((place for stop in asked.stop if (place := text.find(stop)) >= 0), default=len(text))
    text = text[:cut]
    calls = _calls_in(text, number) if asked.tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip(), "tool_calls": calls}


def _calls_in(text: str, number: str) -> list[Message]:
    calls: list[Message] = []
    for found in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(found.group(1))
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, RecursionError):  # a policy says "[[[[" as often as it likes
            return []
        calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
    return calls


def response_body(message: Message, finish_reason: str, *, number: str, prompt: int, reply: int) -> dict[str, Any]:
    """The answer in OpenAI's form.

    Args:
        prompt, reply: tokens.
    """
    reason = "tool_calls" if message.get("tool_calls") else finish_reason
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply},
    }

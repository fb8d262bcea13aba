"""Translates OpenAI's Responses API from and to chat completions: the same conversations, written in another way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.data.messages import Message
from megarl.environments.chat_reply import MODEL, ChatReply, event
from megarl.environments.chat_request import ChatRequest, Refused, check_parameters, read_request
from megarl.environments.parameters import RESPONSES
from megarl.types import SamplingParams

_ID = "resp_"
_PARTS = ("input_text", "output_text", "text")
_AS_IN_CHAT = {"max_output_tokens": "max_tokens", "stream": "stream"}


def read_response_request(
    body: object, earlier: Mapping[str, Sequence[Message]], *params: SamplingParams
) -> ChatRequest:
    """Check the body of a request and read it.

    Args:
        earlier: messages of the episode's conversations up to each of its replies, by the replies' numbers.
        params: as of `read_request`.

    Raises:
        Refused: as `read_request`.
    """
    parameters = check_parameters(body, RESPONSES, params)
    messages: list[Any] = []
    if previous := parameters.get("previous_response_id"):
        number = str(previous).removeprefix(_ID)
        if number not in earlier:
            raise Refused(
                f"previous_response_id: the episode has no response {previous!r:.60}", param="previous_response_id"
            )
        messages += earlier[number]
    if instructions := parameters.get("instructions"):
        messages = [{"role": "system", "content": instructions}, *(m for m in messages if m["role"] != "system")]
    messages += _messages(parameters.get("input", []))
    chat: dict[str, Any] = {"messages": messages}
    if "tools" in parameters:
        chat["tools"] = _tools(parameters["tools"])
    if "tool_choice" in parameters:
        chat["tool_choice"] = _choice(parameters["tool_choice"])
    chat |= {chat_name: parameters[name] for name, chat_name in _AS_IN_CHAT.items() if name in parameters}
    return read_request(chat, *params)


def _messages(items: object) -> list[Any]:
    """Turn items into messages; a call of a function becomes a part of the assistant's message before it."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Refused("input must be text or a list of items", param="input")
    messages: list[Any] = []
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise Refused(f"input[{i}]: an item of type {kind!r:.40} cannot be read here", param="input")
    return messages


def _content(content: object) -> object:
    """Rewrite parts of text in the form of chat completions."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in _PARTS else part
        for part in content
    ]


def _tools(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    kept = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in kept if tool.get(key) is not None}}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


def _choice(choice: object) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def response_id(reply: ChatReply) -> str:
    return f"{_ID}{reply.number}"


def response_body(reply: ChatReply) -> dict[str, Any]:
    """Write the answer to a request for a response."""
    why = {"reason": "max_output_tokens"} if reply.cut_off else None
    return _body(reply, "incomplete" if reply.cut_off else "completed", _items(reply)) | {"incomplete_details": why}


def response_events(reply: ChatReply) -> Iterator[str]:
    """Write the reply as server-sent events, in the order in which OpenAI sends them."""
    number = 0

    def send(kind: str, /, **content: Any) -> str:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **content}, kind)

    begun = _body(reply, "in_progress", [])
    yield send("response.created", response=begun)
    yield send("response.in_progress", response=begun)
    for i, item in enumerate(_items(reply)):
        nothing: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        empty = {**item, "status": "in_progress", **nothing}
        yield send("response.output_item.added", output_index=i, item=empty)
        place = {"item_id": item["id"], "output_index": i}
        if "content" in item:
            (part,) = item["content"]
            place["content_index"] = 0
            yield send("response.content_part.added", **place, part={**part, "text": ""})
            yield send("response.output_text.delta", **place, delta=part["text"], logprobs=[])
            yield send("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield send("response.content_part.done", **place, part=part)
        else:
            yield send("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield send("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        yield send("response.output_item.done", output_index=i, item=item)
    whole = response_body(reply)
    yield send(f"response.{whole['status']}", response=whole)


def _items(reply: ChatReply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    calls = reply.message.get("tool_calls") or []
    if reply.message["content"] or not calls:
        part = {"type": "output_text", "text": reply.message["content"], "annotations": [], "logprobs": []}
        head = {"id": f"msg_{reply.number}", "type": "message", "role": "assistant"}
        items.append({**head, "status": "incomplete" if reply.cut_off else "completed", "content": [part]})
    for call in calls:
        items.append(
            {
                "id": f"fc_{call['id']}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return items


def _body(reply: ChatReply, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": response_id(reply),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": MODEL,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None
        if status == "in_progress"
        else {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.reply_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.reply_tokens,
        },
    }

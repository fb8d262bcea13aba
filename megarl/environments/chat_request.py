"""Reads and checks requests for chat completions, as OpenAI's clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.messages import Message, are_messages, read_messages
from megarl.environments.parameters import CHAT, UNKNOWN, Parameter
from megarl.types import SamplingParams

_MOST_CHOICES = 128  # as OpenAI


class Refused(ValueError):
    """Says why a request is not served.

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
        """Write the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """Holds the parameters of a request that can be served.

    Attributes:
        messages: as the chat template reads them.
        tools: JSON schemas.
        reads_calls: whether calls in the reply become `tool_calls`.
        max_tokens: greatest length of the reply; None: as many as there is room for.
        stop: strings that end the reply, and are no part of its text.
        seed: of the client; None: none.
        choices: how many replies.
        logprobs, stream, usage: the client wants log-probabilities, events, and counts of tokens in the last event.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    reads_calls: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    choices: int = 1
    logprobs: bool = False
    stream: bool = False
    usage: bool = False


def read_request(body: object, *params: SamplingParams) -> ChatRequest:
    """Check the body of a request and read it.

    Args:
        params: how the run draws tokens, now and in training; a request may name these values, and no others.

    Raises:
        Refused: a parameter that would change how tokens are drawn, or that cannot be read.
    """
    parameters = check_parameters(body, CHAT, params)
    limits = [_count(parameters, name) for name in ("max_tokens", "max_completion_tokens") if name in parameters]
    choices = _count(parameters, "n", _MOST_CHOICES) if "n" in parameters else 1
    options = parameters.get("stream_options", {})
    if not isinstance(options, dict):
        raise Refused("stream_options must be an object", param="stream_options")
    tools = _tools(parameters.get("tools", []))
    return ChatRequest(
        messages=_messages(parameters.get("messages")),
        tools=tools,
        reads_calls=bool(tools) and _reads_calls(parameters.get("tool_choice", "auto"), tools),
        max_tokens=min(limits) if limits else None,
        stop=_stop(parameters.get("stop", [])),
        seed=_seed(parameters.get("seed")),
        choices=choices,
        logprobs=_flag(parameters, "logprobs"),
        stream=_flag(parameters, "stream"),
        usage=options.get("include_usage") is True,
    )


def check_parameters(body: object, known: Mapping[str, Parameter], params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Return the parameters that are not null; raises Refused for one that cannot be served."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    parameters = {name: value for name, value in body.items() if value is not None}
    for name, value in parameters.items():
        parameter = known.get(name)
        if parameter is None:
            raise _unsupported(name, UNKNOWN)
        if parameter.fate == "refused" and not any(value == neutral for neutral in parameter.neutral):
            raise _unsupported(name, parameter.says)
        if parameter.fate == "as the run draws":
            allowed = [getattr(run, name) for run in params]
            if value not in allowed:
                raise Refused(
                    f"{name} = {value!r:.40}: the run draws tokens with {name} = {allowed[0]:g}, and trains on what it "
                    f"drew; leave {name} out",
                    param=name,
                )
    return parameters


def _unsupported(name: str, why: str) -> Refused:
    return Refused(f"{name:.40}: {why}", param=name, code="unsupported_parameter")


def _count(parameters: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = parameters[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        upper = "on" if most is None else f"to {most}"
        raise Refused(f"{name} must be a whole number from 1 {upper}", param=name)
    return value


def _flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"{name} must be true or false", param=name)
    return value


def _stop(stop: object) -> tuple[str, ...]:
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused("stop must be a string or a list of strings, none of them empty", param="stop")
    try:
        "".join(stop).encode()
    except UnicodeEncodeError as e:  # half of a surrogate pair, which the engine would find out for the whole run
        raise Refused(f"stop: {e}", param="stop") from e
    return tuple(stop)


def _seed(seed: object) -> int | None:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise Refused("seed must be a whole number", param="seed")
    return seed


def _messages(messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise Refused("messages must be a list of one message or more", param="messages")
    for i, message in enumerate(messages):
        if are_messages(message.get("content")):
            raise Refused(
                f"messages[{i}]: its content is a list of messages; a row's prompt that is a chat is what `messages` "
                "takes, as it is",
                param="messages",
            )
    try:
        # some clients leave an empty reply out
        return tuple(read_messages([{"content": "", **_without_null(message)} for message in messages], "messages"))
    except ValueError as e:
        raise Refused(str(e), param="messages") from e


def _without_null(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _tools(tools: object) -> tuple[Message, ...]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools must be a list of functions' schemas", param="tools")
    for tool in tools:
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise Refused(f"tools: only functions can be offered, not {tool.get('type')!r:.40}", param="tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused("tools: a function has no name", param="tools")
    return tuple(tools)


def _reads_calls(choice: object, tools: Sequence[Message]) -> bool:
    """Return whether calls in the reply are told apart from its text."""
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        return choice != "none"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [tool["function"]["name"] for tool in tools]:
        raise Refused(
            'tool_choice must be "none", "auto", "required", or one of the functions in tools', param="tool_choice"
        )
    return True


def same_message(a: Message, b: Message) -> bool:
    """Return whether two messages say the same; clients change their other fields, and leave empty ones out."""
    return _words(a) == _words(b)


def _words(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], calls


def sampling(params: SamplingParams, request: ChatRequest, begun: int) -> SamplingParams:
    """Make the settings of a reply in a conversation that has `begun` tokens after its prompt."""
    most = params.max_tokens if request.max_tokens is None else min(params.max_tokens, begun + request.max_tokens)
    return replace(params, max_tokens=most, stop=(*params.stop, *(s for s in request.stop if s not in params.stop)))

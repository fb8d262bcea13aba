"""Lists the parameters of requests to the endpoint and their effects, in a table for code and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["served", "ignored", "as the run draws", "refused"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Says what the endpoint does with a parameter of a request.

    Attributes:
        fate: "served"; "ignored", where it changes nothing here; "as the run draws": only the run's own value is
            served; or "refused", unless the value is `neutral`.
        says: the effect, or what to use instead.
        neutral: values that ask for nothing, beside null.
    """

    fate: Fate
    says: str
    neutral: tuple[Any, ...] = ()


_DRAWS = "tokens are drawn as the run says, and trained on: leave it out"
_FREE = (
    "tokens are drawn freely, since what is trained on is what the policy would say by itself; describe the form in "
    "the messages, or as a tool: pydantic-ai's ToolOutput, langchain's method='function_calling'"
)
_NO_SERVICE = "a service of OpenAI's that is not here"


def _many(names: str, fate: Fate, says: str, *neutral: Any) -> dict[str, Parameter]:
    return {name: Parameter(fate=fate, says=says, neutral=neutral) for name in names.split()}


_BOTH: Mapping[str, Parameter] = {
    **_many("model", "ignored", "there is one model"),
    **_many("user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention store",
            "ignored", "a note for OpenAI's service"),
    **_many("parallel_tool_calls", "ignored", "the policy makes as many calls as it makes"),
    **_many("temperature top_p top_k", "as the run draws", "of the run, in training or in this phase"),
    **_many("tools", "served", "functions, through the chat template; refused where it does not write tools down"),
    **_many("tool_choice", "served", '"none": calls stay text. "auto", "required" and a function\'s name: what the '
            "policy says is read for calls, and no call is forced: a policy that makes none gets no reward for one"),
    **_many("stream", "served", "the whole reply comes as one event"),
    **_many("top_logprobs", "refused", "the drawn token's log-probability alone is recorded: leave it out", 0),
    **_many("reasoning_effort reasoning", "refused", "the chat template is told data.apply_chat_template_kwargs", {}),
    **_many("prediction", "ignored", "it would change the speed alone"),
}  # fmt: skip

CHAT: Mapping[str, Parameter] = {
    **_BOTH,
    **_many("messages", "served", "text, parts of text, tool calls and their results"),
    **_many("max_tokens max_completion_tokens", "served", "of one reply"),
    **_many("stop", "served", "texts that end a reply, and are no part of it"),
    **_many("seed", "served", "together with the run's own"),
    **_many("n", "served", "the first goes on with the conversation; each further one begins another, trained on too"),
    **_many("logprobs", "served", "of the drawn tokens, under the distribution that they were drawn from"),
    **_many("stream_options", "served", "include_usage"),
    **_many("response_format", "refused", _FREE, {"type": "text"}),
    **_many("presence_penalty frequency_penalty", "refused", _DRAWS, 0),
    **_many("logit_bias", "refused", _DRAWS, {}),
    **_many("functions function_call", "refused", "OpenAI's older form: use tools and tool_choice", []),
    **_many("modalities", "refused", "only text is said", ["text"]),
    **_many("audio web_search_options", "refused", _NO_SERVICE),
    **_many("verbosity", "refused", "say it in the messages"),
}  # fmt: skip
"""The parameters of POST /chat/completions."""

RESPONSES: Mapping[str, Parameter] = {
    **_BOTH,
    **_many("input", "served", "text or items: messages, function calls and their outputs"),
    **_many("instructions", "served", "the first message, of the system"),
    **_many("max_output_tokens", "served", "of one reply"),
    **_many("previous_response_id", "served", "of the same episode"),
    **_many("include", "ignored", "reasoning and files are not here"),
    **_many("truncation", "refused", "nothing is left out of a conversation: leave it out", "disabled"),
    **_many("text", "refused", _FREE, {"format": {"type": "text"}}, {}),
    **_many("background", "refused", "answers are waited for: leave it out", False),
    **_many("conversation prompt", "refused", _NO_SERVICE),
    **_many("max_tool_calls", "refused", "of OpenAI's own tools, which are not here"),
}
"""The parameters of POST /responses."""

UNKNOWN = "not known here, and it might change how tokens are drawn: leave it out"

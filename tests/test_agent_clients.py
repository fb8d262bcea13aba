"""Agents' libraries at the endpoint: each is told what the policy said, and that is what would be trained on.

They are in launch/requirements-agents.txt; where one is not installed its cases are skipped. The policy is a list of
replies: what is tried here is what clients send and read.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import write_chat_tokenizer
from pydantic import BaseModel

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.speech import Speech
from megarl.rollout.endpoint import Endpoint, Waiting
from megarl.rollout.episodes import Played
from megarl.rollout.sessions import Session
from megarl.types import Completion, Prompt, Rollout, SamplingParams

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=1.0, max_tokens=4000, stop_token_ids=(2,))
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ADD = CALL % ("add", '{"a": 2, "b": 3}')
MODULES = {"openai_agents": "agents", "langchain": "langchain_openai"}


class Answer(BaseModel):
    """The answer."""

    value: int


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def smolagents(base_url: str, kind: str) -> Any:
    import smolagents

    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key="x")
    if kind == "code":
        return smolagents.CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0).run("2 + 3?")
    tools = [smolagents.tool(add)]
    return smolagents.ToolCallingAgent(tools=tools, model=model, max_steps=3, verbosity_level=0).run("2 + 3?")


def openai_agents(base_url: str, kind: str) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    model_of: Any = agents.OpenAIChatCompletionsModel if "chat" in kind else agents.OpenAIResponsesModel
    model = model_of("policy", openai_client=openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0))
    agent = agents.Agent(name="a", instructions="Add.", tools=[agents.function_tool(add)], model=model)

    async def run() -> Any:
        if "streamed" not in kind:
            return (await agents.Runner.run(agent, "2 + 3?")).final_output
        result = agents.Runner.run_streamed(agent, "2 + 3?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def pydantic_ai(base_url: str, kind: str) -> Any:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="x"))
    if kind == "typed":
        return str(pydantic_ai.Agent(model, output_type=Answer).run_sync("2 + 3?").output.value)
    return pydantic_ai.Agent(model, instructions="Add.", tools=[add]).run_sync("2 + 3?").output


def langchain(base_url: str, kind: str) -> Any:
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model="policy", base_url=base_url, api_key="x", max_retries=0)
    if kind == "typed":
        return str(model.with_structured_output(Answer, method="function_calling").invoke("2 + 3?").value)
    if kind == "streamed":

        async def run() -> str:
            return "".join([chunk.content async for chunk in model.astream("2 + 3?")])

        return asyncio.run(run())
    if kind == "graph":
        from langgraph.prebuilt import create_react_agent

        return create_react_agent(model, [add]).invoke({"messages": [("user", "2 + 3?")]})["messages"][-1].content
    return model.invoke("2 + 3?").content


def litellm(base_url: str, kind: str) -> Any:
    import litellm

    del kind
    messages = [{"role": "user", "content": "2 + 3?"}]
    said = litellm.completion("openai/policy", api_base=base_url, api_key="x", messages=messages)
    return said.choices[0].message.content


CASES = [
    (smolagents, "tools", [ADD, CALL % ("final_answer", '{"answer": "5"}')]),
    (smolagents, "code", ["Thought: add.\n<code>\nfinal_answer(2 + 3)\n</code>"]),
    (openai_agents, "chat", [ADD, "5"]),
    (openai_agents, "chat, streamed", [ADD, "5"]),
    (openai_agents, "responses", [ADD, "5"]),
    (openai_agents, "responses, streamed", [ADD, "5"]),
    (pydantic_ai, "text", [ADD, "5"]),
    (pydantic_ai, "typed", [CALL % ("final_result", '{"value": 5}')]),
    (langchain, "plain", ["5"]),
    (langchain, "typed", [CALL % ("Answer", '{"value": 5}')]),
    (langchain, "streamed", ["5"]),
    (langchain, "graph", [ADD, "5"]),
    (litellm, "plain", ["5"]),
]


@contextmanager
def served(folder: Path, replies: list[str]) -> Iterator[tuple[str, Session, list[list[int]]]]:
    """An endpoint whose policy says these; its base_url, the session, and the token ids of each reply."""
    write_chat_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))
    left, drawn = list(replies), list[list[int]]()

    def ask(waiting: Waiting) -> None:
        request = waiting.request
        drawn.append([*tokenizer.encode_template(left.pop(0)), 2])
        ids = request.token_ids + array("i", drawn[-1])
        waiting.answer(Completion(token_ids=ids, logp=array("f", [-0.5] * len(ids)), finish_reason="stop"))

    endpoint = Endpoint(ask, PARAMS)
    rollout = Rollout(prompt=Prompt(index=0, token_ids=(5,), row={}), group=0, seed=1)
    speech = Speech(tokenizer, stop_tokens=(2,), role="user", limit=99)
    keys = iter(range(99)).__next__
    session = Session(rollout, PARAMS, speech=speech, max_turns=50, max_prompt_length=20_000, new_key=keys)
    try:
        yield endpoint.open(session), session, drawn
    finally:
        endpoint.close()


@pytest.mark.parametrize(("client", "kind", "replies"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES])
def test_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Callable[[str, str], Any], kind: str, replies: list[str]
) -> None:
    name = client.__name__
    pytest.importorskip(MODULES.get(name, name), reason="launch/requirements-agents.txt is not installed")
    settings = {"OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    with served(tmp_path, replies) as (base_url, session, drawn):
        assert str(client(base_url, kind)) == "5"
        assert len(drawn) == len(replies)
        played = session.close(reward=1.0, error=None, seconds=1.0)
    assert [ids for part in played for ids in _sampled(part)] == drawn


def _sampled(part: Played) -> Iterator[list[int]]:
    """Token ids of each turn of the policy's."""
    ids = [token if sampled else -1 for token, sampled in zip(part.token_ids, part.sampled, strict=True)]
    turn: list[int] = []
    for token in [*ids, -1]:
        if token >= 0:
            turn.append(token)
        elif turn:
            yield turn
            turn = []

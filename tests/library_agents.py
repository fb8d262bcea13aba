"""Agents of libraries at an endpoint such as OpenAI's: what each answers to a question, some by means of a tool.

They are in launch/requirements-agents.txt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

MODULES = {"openai_agents": "agents", "langchain": "langchain_openai"}
"""Of a library whose functions here begin otherwise than its module is called."""


class Answer(BaseModel):
    """The answer."""

    value: int


async def openai_chat(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    import openai

    policy = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
    said = await policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return said.choices[0].message.content


async def litellm_chat(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    import litellm

    messages = [{"role": "user", "content": question}]
    said = await litellm.acompletion("openai/policy", api_base=base_url, api_key="x", messages=messages)
    return said.choices[0].message.content


async def smolagents_tools(base_url: str, question: str, tool: Callable[..., int], *, max_steps: int = 3) -> Any:
    import smolagents

    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key="x")
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(tool)], model=model, max_steps=max_steps, verbosity_level=0
    )
    return await asyncio.to_thread(agent.run, question)


async def smolagents_code(
    base_url: str, question: str, tool: Callable[..., int], *, system_prompt: str | None = None
) -> Any:
    import smolagents

    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key="x")
    agent = smolagents.CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
    if system_prompt is not None:
        agent.prompt_templates["system_prompt"] = system_prompt
    return await asyncio.to_thread(agent.run, question)


def _openai_agent(base_url: str, tool: Callable[..., int], *, chat: bool) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
    model_of: Any = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    model = model_of("policy", openai_client=client)
    return agents.Agent(name="a", instructions="Calculate.", tools=[agents.function_tool(tool)], model=model)


async def _run(agent: Any, question: str) -> Any:
    import agents

    return (await agents.Runner.run(agent, question)).final_output


async def _run_streamed(agent: Any, question: str) -> Any:
    import agents

    result = agents.Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def openai_agents_chat(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    return await _run(_openai_agent(base_url, tool, chat=True), question)


async def openai_agents_chat_streamed(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    return await _run_streamed(_openai_agent(base_url, tool, chat=True), question)


async def openai_agents_responses(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    return await _run(_openai_agent(base_url, tool, chat=False), question)


async def openai_agents_responses_streamed(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    return await _run_streamed(_openai_agent(base_url, tool, chat=False), question)


def _pydantic_model(base_url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="x"))


async def pydantic_ai_text(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    import pydantic_ai

    agent = pydantic_ai.Agent(_pydantic_model(base_url), instructions="Calculate.", tools=[tool])
    return (await agent.run(question)).output


async def pydantic_ai_typed(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    import pydantic_ai

    agent = pydantic_ai.Agent(_pydantic_model(base_url), output_type=Answer)
    with pydantic_ai.capture_run_messages() as messages:
        try:  # a policy that has not learnt to answer so is asked once more, and then given up
            return (await agent.run(question)).output.value
        except pydantic_ai.UnexpectedModelBehavior:
            said: Any = [part for message in messages for part in message.parts if part.part_kind == "text"]
            return "".join(part.content for part in said)


def _langchain_model(base_url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy", base_url=base_url, api_key="x", max_retries=0)  # type: ignore[arg-type]


async def langchain_plain(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    return (await _langchain_model(base_url).ainvoke(question)).content


async def langchain_typed(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    typed = _langchain_model(base_url).with_structured_output(Answer, method="function_calling", include_raw=True)
    said = await typed.ainvoke(question)
    return said["raw"].content if said["parsed"] is None else said["parsed"].value


async def langchain_streamed(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    return "".join([chunk.content async for chunk in _langchain_model(base_url).astream(question)])


async def langgraph_tools(base_url: str, question: str, tool: Callable[..., int]) -> Any:
    from langgraph.prebuilt import create_react_agent

    graph = create_react_agent(_langchain_model(base_url), [tool])
    return (await graph.ainvoke({"messages": [("user", question)]}))["messages"][-1].content


AGENTS: dict[str, Callable[..., Any]] = {
    agent.__name__: agent
    for agent in (
        openai_chat, litellm_chat, smolagents_tools, smolagents_code, openai_agents_chat, openai_agents_chat_streamed,
        openai_agents_responses, openai_agents_responses_streamed, pydantic_ai_text, pydantic_ai_typed,
        langchain_plain, langchain_typed, langchain_streamed, langgraph_tools,
    )
}  # fmt: skip


def module_of(agent: str) -> str:
    """The module that an agent of AGENTS needs."""
    library = next((name for name in MODULES if agent.startswith(name)), "")
    return MODULES[library] if library else agent.rpartition("_")[0]

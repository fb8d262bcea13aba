"""Agents' libraries in runs: each asks for products with a tool, and what its policy was sampled is what is trained on.

They are in launch/requirements-agents.txt; where one is not installed its case is skipped. What each of them sends and
reads in a conversation that goes well is in test_agent_clients.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from chat_tokenizer import SIZE, write_chat_tokenizer
from tiny_run import megarl, metrics_of, write_run

pytestmark = pytest.mark.slow

AGENTS = '''
import asyncio


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one.
        b: the other.
    """
    return a * b


def worth(said, row):
    """1 for the product, and less for a text with some digits: a policy that knows nothing has something to learn."""
    text = str(said)
    return float(text.strip() == row["answer"]) + sum(c.isdigit() for c in text) / (1 + len(text))


async def openai(base_url, row):
    import openai

    policy = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
    said = await policy.chat.completions.create(model="policy", messages=row["prompt"])
    return worth(said.choices[0].message.content, row)


async def litellm(base_url, row):
    import litellm

    said = await litellm.acompletion("openai/policy", api_base=base_url, api_key="x", messages=row["prompt"])
    return worth(said.choices[0].message.content, row)


async def smolagents_tools(base_url, row):
    import smolagents

    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key="x")
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(multiply)], model=model, max_steps=1, verbosity_level=0)
    return worth(await asyncio.to_thread(agent.run, row["question"]), row)


async def smolagents_code(base_url, row):
    import smolagents

    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key="x")
    agent = smolagents.CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Multiply."  # its own has 10,000 letters, each a token here
    return worth(await asyncio.to_thread(agent.run, row["question"]), row)


def _openai_agent(base_url):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
    model = agents.OpenAIResponsesModel("policy", openai_client=client)
    return agents.Agent(name="a", instructions="Multiply.", tools=[agents.function_tool(multiply)], model=model)


async def openai_agents(base_url, row):
    import agents

    return worth((await agents.Runner.run(_openai_agent(base_url), row["question"])).final_output, row)


async def openai_agents_streamed(base_url, row):
    import agents

    result = agents.Runner.run_streamed(_openai_agent(base_url), row["question"])
    async for _ in result.stream_events():
        pass
    return worth(result.final_output, row)


def _pydantic_model(base_url):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="x"))


async def pydantic_ai_text(base_url, row):
    import pydantic_ai

    agent = pydantic_ai.Agent(_pydantic_model(base_url), instructions="Multiply.", tools=[multiply])
    return worth((await agent.run(row["question"])).output, row)


async def pydantic_ai_typed(base_url, row):
    import pydantic_ai

    agent = pydantic_ai.Agent(_pydantic_model(base_url), output_type=int)
    with pydantic_ai.capture_run_messages() as messages:
        try:  # a policy that has not learnt to answer so is asked once more, and then given up
            return worth((await agent.run(row["question"])).output, row)
        except pydantic_ai.UnexpectedModelBehavior:
            said = [part.content for message in messages for part in message.parts if part.part_kind == "text"]
            return worth("".join(said), row)


def _langchain_model(base_url):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy", base_url=base_url, api_key="x", max_retries=0)


async def langchain(base_url, row):
    return worth((await _langchain_model(base_url).ainvoke(row["question"])).content, row)


async def langchain_streamed(base_url, row):
    return worth("".join([chunk.content async for chunk in _langchain_model(base_url).astream(row["question"])]), row)


async def langgraph(base_url, row):
    from langgraph.prebuilt import create_react_agent

    graph = create_react_agent(_langchain_model(base_url), [multiply])
    return worth((await graph.ainvoke({"messages": [("user", row["question"])]}))["messages"][-1].content, row)
'''
CLIENTS = {
    "openai": "openai",
    "litellm": "litellm",
    "smolagents_tools": "smolagents",
    "smolagents_code": "smolagents",
    "openai_agents": "agents",
    "openai_agents_streamed": "agents",
    "pydantic_ai_text": "pydantic_ai",
    "pydantic_ai_typed": "pydantic_ai",
    "langchain": "langchain_openai",
    "langchain_streamed": "langchain_openai",
    "langgraph": "langgraph",
}


def run_of(folder: Path, agent: str) -> Path:
    """The calculator's task, products of two digits, for an agent of AGENTS."""
    config = write_run(folder, trainer__total_training_steps=3)
    write_chat_tokenizer(folder)
    (folder / "agents.py").write_text(AGENTS)
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | {"vocab_size": SIZE, "max_position_embeddings": 20_000}))
    products = [(f"{a}*{b}=", str(a * b)) for a in range(2, 10) for b in range(2, 10)]
    rows = [
        {"prompt": [{"role": "user", "content": asked}], "question": asked, "answer": answer}
        for asked, answer in products
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = yaml.safe_load(config.read_text())
    values["data"] |= {"val_files": [], "max_prompt_length": 16_000, "max_response_length": 60, "train_batch_size": 2}
    values["actor_rollout_ref"]["actor"] |= {"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 20_000}
    values["actor_rollout_ref"]["rollout"] |= {"n": 3, "max_num_seqs": 6}
    values["environment"] = {"agent": f"{folder / 'agents.py'}:{agent}", "workers": 1, "timeout": 300}
    config.write_text(yaml.safe_dump(values))
    return config


@pytest.mark.parametrize("agent", CLIENTS)
def test_a_client_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str) -> None:
    """The engine's log-probabilities of all that the policy said are those of the training layout at these ids."""
    if find_spec(CLIENTS[agent]) is None:
        pytest.skip("launch/requirements-agents.txt is not installed")
    for name, value in {"OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}.items():
        monkeypatch.setenv(name, value)
    done = megarl("train", str(run_of(tmp_path, agent)), timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics_of(tmp_path)
    assert len(rows) == 3
    for row in rows:
        assert row["rollout/logp_gap_max"] < 1e-4 and row["reward/failed"] == 0
        assert row["episode/turns_mean"] >= 1 and row["tokens"] > 0
    assert any(row["actor/grad_norm"] > 0 and row["score/std"] > 0 for row in rows)

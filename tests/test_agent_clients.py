"""Agents' libraries at the endpoint: each is told what the policy said, and that is what would be trained on.

They are in launch/requirements-agents.txt; where one is not installed its cases are skipped. The policy is a list of
replies: what is tried here is what clients send and read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chat_tokenizer import write_chat_tokenizer
from library_agents import AGENTS, module_of

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.endpoint import Endpoint, Waiting
from megarl.environments.episodes import Played
from megarl.environments.sessions import Session
from megarl.environments.speech import Speech
from megarl.types import Completion, Prompt, Rollout, SamplingParams

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=1.0, max_tokens=4000, stop_token_ids=(2,))
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ADD = CALL % ("add", '{"a": 2, "b": 3}')


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one.
        b: the other.
    """
    return a + b


REPLIES = {
    "openai_chat": ["5"],
    "litellm_chat": ["5"],
    "smolagents_tools": [ADD, CALL % ("final_answer", '{"answer": "5"}')],
    "smolagents_code": ["Thought: add.\n<code>\nfinal_answer(2 + 3)\n</code>"],
    "openai_agents_chat": [ADD, "5"],
    "openai_agents_chat_streamed": [ADD, "5"],
    "openai_agents_responses": [ADD, "5"],
    "openai_agents_responses_streamed": [ADD, "5"],
    "pydantic_ai_text": [ADD, "5"],
    "pydantic_ai_typed": [CALL % ("final_result", '{"value": 5}')],
    "langchain_plain": ["5"],
    "langchain_typed": [CALL % ("Answer", '{"value": 5}')],
    "langchain_streamed": ["5"],
    "langgraph_tools": [ADD, "5"],
}


@contextmanager
def served(folder: Path, replies: list[str]) -> Iterator[tuple[str, Session, list[list[int]]]]:
    """An endpoint whose policy says these; its base_url, the session, and the token ids of each reply."""
    write_chat_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))
    left, drawn = list(replies), list[list[int]]()

    def ask(waiting: Waiting) -> None:
        request = waiting.request
        drawn.append([*tokenizer.encode_template(left.pop(0)), 2])
        response = request.response.drawn(drawn[-1], [-0.5] * len(drawn[-1]))
        waiting.answer(Completion(response=response, finish_reason="stop"))

    endpoint = Endpoint(ask, PARAMS)
    rollout = Rollout(prompt=Prompt(index=0, token_ids=(5,), row={}), group=0, seed=1)
    speech = Speech(tokenizer, stop_tokens=(2,), role="user", limit=99)
    keys = iter(range(99)).__next__
    session = Session(rollout, PARAMS, speech=speech, max_turns=50, max_prompt_length=20_000, new_key=keys)
    try:
        yield endpoint.open(session), session, drawn
    finally:
        endpoint.close()


@pytest.mark.parametrize("client", AGENTS)
def test_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    pytest.importorskip(module_of(client), reason="launch/requirements-agents.txt is not installed")
    replies = REPLIES[client]
    settings = {"OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    with served(tmp_path, replies) as (base_url, session, drawn):
        assert str(asyncio.run(AGENTS[client](base_url, "2 + 3?", add))) == "5"
        assert len(drawn) == len(replies)
        played = session.close(reward=1.0, error=None, seconds=1.0)
    assert [ids for part in played for ids in _sampled(part)] == drawn


def _sampled(part: Played) -> list[list[int]]:
    """Token ids of each turn of the policy's."""
    return [list(ids) for drawn, ids in part.response.turns if drawn]

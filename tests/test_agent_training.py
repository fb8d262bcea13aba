"""Agents' libraries in runs: each asks for products with a tool, and what its policy was sampled is what is trained on.

They are in launch/requirements-agents.txt; where one is not installed its case is skipped. What each of them sends and
reads in a conversation that goes well is in test_agent_clients.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import library_agents
import pytest
import yaml
from chat_tokenizer import SIZE, write_chat_tokenizer
from tiny_run import megarl, metrics_of, write_run

pytestmark = pytest.mark.slow

AGENT = '''
from library_agents import AGENTS

OPTIONS = {
    "smolagents_tools": {"max_steps": 1},  # a reply that calls no tool is asked for again, and there is no room for it
    "smolagents_code": {"system_prompt": "Multiply."},  # its own has 10,000 letters, each a token here
}


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one.
        b: the other.
    """
    return a * b


async def agent(base_url, row):
    """1 for the product, and less for a text with some digits: a policy that knows nothing has something to learn."""
    agent = row["agent"]
    said = str(await AGENTS[agent](base_url, row["question"], multiply, **OPTIONS.get(agent, {})))
    return float(said.strip() == row["answer"]) + sum(c.isdigit() for c in said) / (1 + len(said))
'''


def run_of(folder: Path, agent: str) -> Path:
    """The calculator's task, products of two digits, for an agent of `library_agents`, which lies beside the run's."""
    config = write_run(folder, trainer__total_training_steps=3)
    write_chat_tokenizer(folder)
    (folder / "asks.py").write_text(AGENT)
    shutil.copy(library_agents.__file__, folder)
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | {"vocab_size": SIZE, "max_position_embeddings": 20_000}))
    products = [(f"{a}*{b}=", str(a * b)) for a in range(2, 10) for b in range(2, 10)]
    rows = [
        {"prompt": [{"role": "user", "content": asked}], "question": asked, "answer": answer, "agent": agent}
        for asked, answer in products
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = yaml.safe_load(config.read_text())
    values["data"] |= {"val_files": [], "max_prompt_length": 16_000, "max_response_length": 60, "train_batch_size": 2}
    values["actor_rollout_ref"]["actor"] |= {"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 20_000}
    values["actor_rollout_ref"]["rollout"] |= {"n": 3, "max_num_seqs": 6}
    values["environment"] = {"agent": f"{folder / 'asks.py'}:agent", "workers": 1, "timeout": 300}
    config.write_text(yaml.safe_dump(values))
    return config


@pytest.mark.parametrize("agent", library_agents.AGENTS)
def test_a_client_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str) -> None:
    """The engine's log-probabilities of all that the policy said are those of the training layout at these ids."""
    if find_spec(library_agents.module_of(agent)) is None:
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

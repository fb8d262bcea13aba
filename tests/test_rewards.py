"""Verifiers and how they are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reasoning_gym

from megarl.rewards import load_reward


def test_exact_match() -> None:
    score = load_reward("exact_match")
    assert score(" 12\n", {"answer": "12"}) == 1.0
    assert score("12", {"answer": 12}) == 1.0
    assert score("120", {"answer": "12"}) == 0.0
    with pytest.raises(ValueError, match=r"set data\.answer_key to one of q, solution"):
        score("12", {"q": "", "solution": "12"})


@pytest.mark.parametrize("task", ["chain_sum", "word_sorting", "countdown"])
def test_reasoning_gym_scores_its_own_answers(task: str) -> None:
    score = load_reward("reasoning_gym")
    for entry in reasoning_gym.create_dataset(task, seed=3, size=3):
        row = json.loads(json.dumps({"data_source": task, **entry}))  # as it comes out of a file
        answer = row["answer"] if task != "countdown" else row["metadata"]["expression"]
        assert score(f" {answer} ", row) == 1.0
        assert score("nonsense", row) < 0.1


def test_reasoning_gym_refusals() -> None:
    score = load_reward("reasoning_gym")
    with pytest.raises(ValueError, match="needs the columns data_source, metadata; the row has question, answer"):
        score("1", {"question": "", "answer": ""})
    with pytest.raises(ValueError, match="data_source = 'gsm' is no reasoning-gym task"):
        score("1", {"data_source": "gsm", "question": "", "answer": "", "metadata": {}})


def test_unknown_name_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(ValueError) as refusal:
        load_reward("reasoning_gim")
    assert str(refusal.value) == (
        "reward.name = 'reasoning_gim' is not known; use reasoning_gym, exact_match, or path/to/file.py:function"
    )


def test_reward_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LIMIT = 5\n\ndef short(response, row):\n    return float(len(response) < LIMIT)\n")
    score = load_reward(f"{file}:short")
    assert (score("1234", {}), score("12345", {})) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"mine\.py' has no function 'shrt'; it has short$"):
        load_reward(f"{file}:shrt")
    with pytest.raises(ValueError, match=r"no file at 'no/such\.py'"):
        load_reward("no/such.py:short")
    file.write_text("import no_such_module\n")
    with pytest.raises(ValueError, match=r"importing '.*mine\.py' failed: ModuleNotFoundError: No module named"):
        load_reward(f"{file}:short")

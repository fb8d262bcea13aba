"""Verifiers and how they are found."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import prepare_reasoning_gym
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards import load_reward
from megarl.rewards.reasoning_gym_json import decode, encode


def test_exact_match() -> None:
    score = load_reward("exact_match")
    assert score(" 12\n", {"answer": "12"}) == 1.0
    assert score("12", {"answer": 12}) == 1.0
    assert score("120", {"answer": "12"}) == 0.0
    assert score("7", {"answer": 7.0}) == 1.0  # what a table makes of whole numbers with a gap
    assert score("7", {"answer": np.float64(7.0)}) == score("7.5", {"answer": 7.5}) == 1.0
    assert score("7", {"answer": b"7"}) == score("True", {"answer": True}) == 1.0
    assert score.check_row is not None
    score.check_row({"answer": 0})
    with pytest.raises(ValueError, match=r"^needs an answer; there is 'solution': set data\.answer_key=solution$"):
        score.check_row({"q": "", "solution": "12"})
    with pytest.raises(ValueError, match=r"^needs an answer, and the row's is null$"):
        score.check_row({"answer": None})
    with pytest.raises(ValueError, match=r"^needs an answer, and the row's is blank$"):
        score.check_row({"answer": " \n"})
    with pytest.raises(ValueError, match=r"^needs an answer, and the row's is blank$"):
        score("", {"answer": " "})


@pytest.mark.parametrize("task", ["chain_sum", "word_sorting", "countdown"])
def test_reasoning_gym_scores_its_own_answers(task: str) -> None:
    score = load_reward("reasoning_gym")
    for entry in reasoning_gym.create_dataset(task, seed=3, size=3):
        row = json.loads(json.dumps({"data_source": task, **entry}))  # as it comes out of a file
        answer = row["answer"] if task != "countdown" else row["metadata"]["expression"]
        assert score(f" {answer} ", row) == 1.0
        assert score("nonsense", row) < 0.1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "", "answer": ""}, "needs the columns data_source, metadata; the row has question, answer"),
        ({"data_source": "gsm"}, "finds no task of reasoning-gym called 'gsm' (data_source)"),
        ({"data_source": None}, "needs a task's name in column 'data_source', not NoneType"),
        ({"metadata": "{}", "data_source": "ab"}, "needs an object in column 'metadata', not str"),
        (
            {"metadata": {"python": "tuple", "is": [1]}, "data_source": "ab"},
            "needs an object in column 'metadata', not dict",
        ),
        ({"question": None}, "needs text in column 'question', not NoneType"),
        ({"answer": 2, "data_source": "chain_sum"}, "needs text in column 'answer', not int"),
        ({"answer": None, "data_source": "chain_sum"}, "needs text in column 'answer', not NoneType"),
        ({"answer": ["2"], "data_source": "chain_sum"}, "needs text in column 'answer', not list"),
    ],
)
def test_rows_that_reasoning_gym_cannot_score(row: dict[str, object], said: str) -> None:
    check = load_reward("reasoning_gym").check_row
    assert check is not None
    whole = {"data_source": "chain_sum", "question": "1 + 1", "answer": "2", "metadata": {}}
    check(whole)
    with pytest.raises(ValueError) as refusal:
        check(row if "question" in row and "answer" in row else {**whole, **row})
    assert str(refusal.value) == said


def test_a_response_of_another_form_scores_0_and_a_wrong_row_is_named() -> None:
    score = load_reward("reasoning_gym")
    (entry,) = reasoning_gym.create_dataset("prime_factorization", seed=1, size=1)
    row = {"data_source": "prime_factorization", **entry}
    assert score(row["answer"], row) == 1.0
    assert score("two times three", row) == 0.0  # its verifier raises
    with pytest.raises(
        ValueError, match="prime_factorization does not accept the row's own answer: the row is not what"
    ):
        score("two times three", {**row, "answer": "six"})


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.fractions()
_hashable = st.recursive(
    _scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=3
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["python", "is", "x"]), inner)
        | st.dictionaries(_hashable, inner, max_size=2)
        | st.sets(_hashable, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(_values)
def test_values_come_back_from_json_with_their_types(value: object) -> None:
    def typed(v: object) -> object:
        """Python says 1 == 1.0 == True."""
        if isinstance(v, dict):
            return {"dict": [(typed(k), typed(x)) for k, x in v.items()]}
        if isinstance(v, list | tuple):
            return [type(v), *map(typed, v)]
        return [type(v), sorted(repr(typed(x)) for x in v) if isinstance(v, set | frozenset) else v]

    assert typed(decode(json.loads(json.dumps(encode(value))))) == typed(value)


def test_ordinary_json_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, {"python": 3}], "b": "x"}
    assert encode(value) == value and decode(value) == value
    assert encode({"at": (1, Fraction(2, 3))}) == {
        "at": {"python": "tuple", "is": [1, {"python": "Fraction", "is": "2/3"}]}
    }
    with pytest.raises(ValueError, match=r"no JSON for a value of type builtins\.complex: 1j"):
        encode([1j])
    with pytest.raises(ValueError, match=r"is no value that tools/prepare_reasoning_gym\.py writes"):
        decode({"python": "set", "is": [[1]]})


@pytest.mark.parametrize(
    "task", ["arc_agi", "rearc", "gsm_symbolic", "graph_color", "knights_knaves", "chain_sum", "boxnet"]
)
def test_prepared_rows_score_as_the_task_does(tmp_path: Path, task: str) -> None:
    """gsm_symbolic has fractions in one row of a few hundred, arc_agi and rearc compare tuples."""
    arguments = ["--out", str(tmp_path), "--task", task, "--train", "280" if task == "gsm_symbolic" else "3"]
    assert prepare_reasoning_gym.main([*arguments, "--val", "1", "--chat"]) == 0
    score = load_reward("reasoning_gym")
    assert score.check_row is not None
    for line in (tmp_path / "train.jsonl").read_text().splitlines()[-3:]:
        row = json.loads(line)
        score.check_row(row)
        if row["answer"] is not None:
            assert score(row["answer"], row) == 1.0
        assert score("nonsense", row) < 0.1


def test_a_task_that_a_file_would_change_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_reasoning_gym, "encode", lambda value: json.loads(json.dumps(value)))
    assert prepare_reasoning_gym.main(["--out", str(tmp_path), "--task", "rearc", "--train", "1", "--val", "1"]) == 2
    assert capsys.readouterr().err == (
        "prepare_reasoning_gym: --task rearc: its own answer scores 1.0, but 0.05 after reading it from a file\n"
    )


def test_unknown_name() -> None:
    with pytest.raises(ValueError) as refusal:
        load_reward("reasoning_gim")
    assert str(refusal.value) == (
        "reward.name = 'reasoning_gim' is not known; use reasoning_gym, openai_judge, code, environment, exact_match, "
        "format, gsm8k, http, length, math_verify, multiple_choice, overlong, regex, or path/to/file.py:function"
    )


def test_reward_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LIMIT = 5\n\ndef short(response, row):\n    return float(len(response) < LIMIT)\n")
    score = load_reward(f"{file}:short")
    assert (score("1234", {}), score("12345", {})) == (1.0, 0.0)
    assert score.name == f"{file}:short" and score.check_row is None

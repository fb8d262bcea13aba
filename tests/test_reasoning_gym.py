"""Responses and rows that reasoning-gym's verifiers would run as code, or pay for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from selection import quick

from megarl.config.reward import RewardConfig
from megarl.rewards import load_reward
from megarl.rewards.outside.guards import EVALUATED, GUARDS
from megarl.rewards.outside.reasoning_gym import GENERATING, evaluating_calls
from megarl.rewards.parts import parts_of, refusal_of
from megarl.rewards.pool import RewardPool
from megarl.rewards.reasoning_gym_compared import COMPARED
from megarl.rewards.reasoning_gym_json import encode
from megarl.rewards.results import Response, Scored
from megarl.types import Prompt

EVALUATING = [
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
]
"""Tasks that evaluate responses."""


def row_of(task: str, **changed: Any) -> dict[str, Any]:
    (entry,) = reasoning_gym.create_dataset(task, seed=3, size=1)
    row = {"data_source": task, **{key: encode(entry[key]) for key in ("question", "answer", "metadata")}, **changed}
    whole: dict[str, Any] = json.loads(json.dumps(row))
    return whole


def score(response: str, row: dict[str, Any]) -> float:
    return float(load_reward("reasoning_gym")(response, row))


def attacks(canary: Path) -> list[str]:
    """Of Python that a response may be: each leaves a file, or answers for itself."""
    write = f"open({str(canary)!r}, 'w')"
    return [
        write,
        f"[{write}]",
        f"[__import__('os').system('touch {canary}')]",
        f"(lambda: {write})()",
        f"[c for c in ().__class__.__base__.__subclasses__() if {write}]",
        f"[x := {write}]",
        f"f'{{{write}}}'",
        f"1 if {write} else 0",
        f"x.__class__({write})",
        "entry['answer']",
        "oracle_answer",
        "[*oracle_answer]",
        "entry['metadata']['valid_answers'][0]",
        "type('E', (), {'__eq__': lambda *a: True, '__iter__': lambda s: iter(['x'])})()",
        "sympify('__import__(\"os\").getpid()')",
        "Integral(x, x)",
        "Integral(X**2, X)",
        "Function('f')(x)",
        "S('x')",
        "exec('raise SystemExit')",
        "9**9**9**9",
        "(((9**64)**64)**64)**64",
        "(" * 4_000 + "1" + ")" * 4_000,
        "[" * 100_000,
        "-" * 100_000 + "1",
        "factorial(10**9)",
        "1_0",
        "0x10",
        "1e400",
        "True",
        "",
    ]


@pytest.mark.parametrize("task", quick(EVALUATING, 0, 1, 3, 5, 7, 8))
def test_a_response_runs_nothing_and_is_paid_nothing(task: str, tmp_path: Path) -> None:
    row, canary = row_of(task), tmp_path / "canary"
    for attack in attacks(canary):
        assert score(attack, row) <= 0.05, attack[:80]  # what countdown pays for a formula of other numbers
        assert not canary.exists(), attack
    assert score(str(row["answer"]), row) == 1.0


def test_no_response_reaches_the_score_of_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through the processes of a run: the key stays unread, the verifier stays what it was."""
    monkeypatch.setenv("WANDB_API_KEY", "the-key")
    attack = (
        "[__import__('sys').modules['megarl.rewards.outside.reasoning_gym'].__dict__.update(verifier_of=lambda t: "
        f"lambda *a: 1.0), open({str(tmp_path / 'canary')!r}, 'w').write(__import__('os').environ['WANDB_API_KEY'])]"
    )
    row = row_of("spiral_matrix")
    prompt = Prompt(index=0, token_ids=(1,), row=row)
    pool = RewardPool(parts_of(RewardConfig(name="reasoning_gym")), RewardConfig(name="reasoning_gym"), 1)
    try:
        for key, text in enumerate([attack, "no idea", str(row["answer"])]):
            pool.submit(key, Response(text=text, tokens=1, finish_reason="stop"), prompt)
        done = pool.collect()
    finally:
        pool.close()
    scores = [one.score for one in done.values() if isinstance(one, Scored)]
    assert scores == [0.0, 0.0, 1.0] and not (tmp_path / "canary").exists()


def test_lists_and_formulas_are_scored_as_ever() -> None:
    spiral = row_of("spiral_matrix")
    assert score(str([int(word) for word in spiral["answer"].split()]), spiral) == 0.1
    assert score(repr(spiral["answer"].split()), spiral) == 0.1
    letters = row_of("string_insertion")
    assert score(str(list(letters["answer"])), letters) == 0.1
    integral = row_of("simple_integration")
    assert score(f"{integral['answer']} + 3*C", integral) == 1.0
    assert score("x**2", integral) == 0.0
    product = row_of("polynomial_multiplication")
    terms = str(product["answer"]).replace(" - ", " + -").split(" + ")
    assert score(" + ".join(reversed(terms)), product) == 1.0
    countdown = row_of("countdown")
    assert score(f"({countdown['answer']})", countdown) == 1.0
    assert score(f"{countdown['answer']} + 0", countdown) == 0.05


@pytest.mark.parametrize(
    ("task", "changed"),
    [
        ("number_sorting", {"answer": "[__import__('os').getpid()]"}),
        ("number_sorting", {"answer": "open('/tmp/canary', 'w')"}),
        ("polynomial_multiplication", {"answer": "__import__('os').getpid()"}),
        ("polynomial_multiplication", {"answer": "x.__class__"}),
        ("simple_integration", {"metadata": {"variable": "x", "integrand": "__import__('os').getpid()"}}),
        ("intermediate_integration", {"metadata": {"variable": "x", "integrand": "exec('1')"}}),
        ("bitwise_arithmetic", {"metadata": {"problem": "__import__('os').getpid()"}, "answer": "1"}),
        ("bitwise_arithmetic", {"metadata": {"problem": "().__class__"}, "answer": "1"}),
    ],
)
def test_a_row_with_code_is_refused(task: str, changed: dict[str, Any]) -> None:
    said = refusal_of(row_of(task, **changed), task, (("reasoning_gym", (), "{}"),))
    assert said.startswith(f"reward reasoning_gym {task} evaluates ") and "is not what it may evaluate" in said
    with pytest.raises(ValueError, match="evaluates"):
        score("[1, 2]", row_of(task, **changed))


def test_tasks_that_pay_for_nothing_are_mended() -> None:
    for seed in range(8):
        (entry,) = reasoning_gym.create_dataset("game_of_life_halting", seed=seed, size=1)
        row = json.loads(json.dumps({"data_source": "game_of_life_halting", **entry}))
        right, wrong = (entry["answer"], "True" if entry["answer"] == "False" else "False")
        assert [score(text, row) for text in (right, f"{right.lower()}.", wrong, "no idea", "")] == [1, 1, 0, 0, 0]
    for seed in range(8):
        (entry,) = reasoning_gym.create_dataset("coin_flip", seed=seed, size=1)
        row = json.loads(json.dumps({"data_source": "coin_flip", **entry}))
        numbers = entry["metadata"]["rational"]
        assert score(f"{numbers['numerator']}/{numbers['denominator']}", row) == 1.0
        assert [score(text, row) for text in ("0", "0.", "1.5", "0.0", "1e-9", "1e99999999", "nan")] == [0.0] * 7
    for seed in range(8):
        (entry,) = reasoning_gym.create_dataset("complex_arithmetic", seed=seed, size=1)
        row = {"data_source": "complex_arithmetic", **{key: encode(entry[key]) for key in entry}}
        right = str(entry["answer"])
        assert [score(text, row) for text in (right, f"({right})", right.replace(" ", ""))] == [1.0] * 3
        endless = (
            "nan",
            "NaN + NaNi",
            "nani",
            "1 + nani",
            "inf",
            "-infinity",
            "inf - infi",
            "1e999",
            "1e999 + 1e999i",
            "",
        )
        assert [score(text, row) for text in endless] == [0.0] * len(endless)
    numbers = row_of("number_sorting")
    assert score(numbers["answer"], numbers) == 1.0
    count = len(json.loads(numbers["answer"].replace("'", '"')))
    assert score(json.dumps([float("nan")] * count), numbers) == 0.0
    assert score(json.dumps(["nan"] * count), numbers) == 0.0
    four = row_of("puzzle24", metadata={"numbers": [7, 4, 4, 1]}, answer="1*(7*4 - 4)")
    assert [score(text, four) for text in ("1*(7*4 - 4)", "6*4*1*1", "7*4-4+1-1", "(7*4-4)*1.0")] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_all_tasks_that_evaluate_are_known() -> None:
    """A newer reasoning-gym may add one: it needs a guard before it is called."""
    from reasoning_gym.factory import DATASETS

    tasks = [task for task in DATASETS if task != "composite"]
    assert len(tasks) >= 100
    evaluating = {task for task in tasks if evaluating_calls(task)}
    assert evaluating == {*EVALUATING, *GENERATING, "bitwise_arithmetic", "number_sorting"}
    assert evaluating - GENERATING <= GUARDS.keys() | EVALUATED.keys()
    assert set(EVALUATING) <= GUARDS.keys()


def test_tasks_that_compare_are_scored_as_by_their_verifiers() -> None:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    plain = {task for task, (kind, _) in DATASETS.items() if kind.score_answer is ProceduralDataset.score_answer}
    assert {*plain, "chain_sum", "products"} == COMPARED.keys()
    others = ["", ",", ",,", "1e3", "+01,000.00", "1_0", "٣", "nan", "sNaN", "inf", "1e999999999999", "0x3", "x" * 9]
    for task, compare in COMPARED.items():
        verifier = reasoning_gym.get_score_answer_fn(task)
        for entry in reasoning_gym.create_dataset(task, seed=5, size=3):
            right = entry["answer"]
            row = row_of(task, answer=right)
            near = [f"{right}.0", f"+{right}", f"0{right}", f"{right},", f"so it is {right}", right[:-1], right * 2]
            for response in [right, *near, *others]:
                assert compare(response, right) == verifier(response, entry), (task, response)
                assert score(f" {response}\n", row) == verifier(response.strip(), entry), (task, response)


def test_a_row_that_compares_to_nothing_is_refused() -> None:
    for answer in ("", ",", 5, None, ["5"]):
        said = refusal_of(row_of("chain_sum", answer=answer), "chain_sum", (("reasoning_gym", (), "{}"),))
        assert said.startswith("reward reasoning_gym"), answer


def test_premises_are_no_conclusion() -> None:
    """They follow from themselves: the task pays for two of them, joined, in full."""
    for entry in reasoning_gym.create_dataset("propositional_logic", seed=5, size=8):
        row = {**entry, "data_source": "propositional_logic", "metadata": encode(entry["metadata"])}
        premises, example = entry["metadata"]["premises"], entry["metadata"]["example_answer"]
        joined = f"({premises[0]} ∧ {premises[-1]})"
        assert score(example, row) >= 0.25  # a single letter is a trivial conclusion
        restated = [one for one in {*premises, joined} - {example} if sum(map(str.isupper, one)) > 2]
        assert [score(one, row) for one in restated] == [0.0] * len(restated)

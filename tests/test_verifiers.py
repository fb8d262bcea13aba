"""Rewards that compare, match, measure and run what a response holds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.evaluation.answers import last_boxed
from megarl.rewards import load_reward
from megarl.rewards.code import last_block, read_tests
from megarl.rewards.parts import refusal_of
from megarl.rewards.registry import names

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed {a\}b}", r"a\}b"),
        (r"\fbox{3} \boxedness{4}", "3"),
        (r"\boxed", None),
        ("", None),
        ("\\boxed{" * 100_000, None),
        (r"{ \boxed{1} } } \boxed{a \boxed{b} c", "b"),
    ],
)
def test_the_last_box(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


def score(name: str, response: str, row: dict[str, Any], **args: Any) -> Any:
    reward = load_reward(name)
    if reward.check_row is not None:
        reward.check_row(row, **args)
    if reward.check_args is not None:
        reward.check_args(**{key: value for key, value in args.items() if key != "tokens"})
    return reward(response, row, **args)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("6 * 3 = 18\n#### 18", "18", 1),
        ("#### 18\nno\n#### 19", "18", 0),
        ("#### 1,200.0", 1200, 1),
        ("####$ 18.50", "18.5", 1),
        ("#### $-3", "-3", 1),
        ("#### 18 dollars", "18", 1),
        ("#### eighteen", "18", 0),
        ("18", "18", 0),
        ("#### ", "18", 0),
        ("#### 18", "She has 9 * 2 = <<9*2=18>>18.\n#### 18", 1),
        ("#### " + "9" * 100_000, "18", 0),
        ("#### 0", "0", 1),
        ("#### 18.", "18", 1),
        ("#### 18%", "18", 1),
        ("#### 18\nso 19", "18", 1),
        ("#### 18", 18.0, 1),
        ("#### 18 or 19", "18", 0),
        ("#### 36/2", "36", 0),
        ("#### 18 = 6 * 3", "18", 0),
        ("#### 18 million", "18", 0),
        ("#### 18x", "18", 0),
        ("#### 1,8", "18", 0),
        ("#### 1,,8", "18", 0),
        ("#### \u0661\u0668", "18", 0),
        ("#### \uff11\uff18", "18", 0),
        ("#### 18\u0660", "18", 0),
    ],
)
def test_gsm8k(response: str, answer: object, expected: float) -> None:
    assert score("gsm8k", response, {"answer": answer}) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"\boxed{B}", "B", 1),
        (r"\boxed{\text{(b)}}", "B", 1),
        (r"\boxed{A} so \boxed{B}", "B", 1),
        (r"\boxed{BC}", "B", 0),
        ("The answer is (C).", "C", 1),
        ("Answer: **B**", "B", 1),
        ("the answer is A. Wait, the answer is D", "D", 1),
        ("<answer> c </answer>", 2, 1),
        ("B", "(B)", 1),
        ("b.", "B", 1),
        ("A good question", "A", 0),
        ("The answer is a matter of taste", "A", 0),
        ("Answer: All of them", "A", 0),
        ("E", "A", 0),
        ("", "A", 0),
        ("The answer is A. Because B is false.", "A", 1),
        ("The answer is C", 2.0, 1),
        ("The answer is A or B", "A", 0),
        ("The answer is A. The answer is B or C", "A", 0),
        ("Answer: A, B, C, D", "A", 0),
        ("answer is (A) (B) (C) (D)", "A", 0),
        ("<answer>A</answer> or B", "A", 0),
        ("The answer is not A", "A", 0),
        (r"\boxed{A, B}", "A", 0),
        ("\u0410", "A", 0),
    ],
)
def test_multiple_choice(response: str, answer: object, expected: float) -> None:
    assert score("multiple_choice", response, {"answer": answer}) == expected


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("gsm8k", "####{}"),
        ("gsm8k", "#### ${}-{}"),
        ("multiple_choice", "answer{}"),
        ("multiple_choice", "The answer is{}:{}**{}"),
        ("multiple_choice", "<answer>{}"),
        ("multiple_choice", "\\boxed{{{}}}"),
    ],
)
@pytest.mark.parametrize("blank", [" ", "\n", "\t"])
def test_a_response_of_blanks_takes_no_time(name: str, response: str, blank: str) -> None:
    """A policy that has collapsed writes blanks up to its greatest length, and a late score ends the run."""
    assert score(name, response.format(*[blank * 20_000] * 3), {"answer": "1"}) == 0.0


def test_regex() -> None:
    pattern = "(?s)<answer>(.*?)</answer>"
    assert score("regex", "<answer>1</answer><answer> 12\n</answer>", {"answer": 12}, pattern=pattern) == 1.0
    assert score("regex", "<answer>12</answer><answer>1</answer>", {"answer": 12}, pattern=pattern) == 0.0
    assert score("regex", "12", {"answer": 12}, pattern=pattern) == 0.0
    assert score("regex", "so: 7", {}, pattern=r"\d", compare=False) == 1.0
    assert score("regex", "so:", {}, pattern=r"\d", compare=False) == 0.0


def test_expressions_without_end_score_0() -> None:
    opened = "<answer>" * 20_000
    assert score("regex", opened, {"answer": "1"}, pattern="(?s)<answer>(.*?)</answer>", timeout=0.5) == 0.0
    assert score("regex", "a" * 5_000, {"answer": "1"}, pattern="((?:a|aa)+)$b", timeout=0.5) == 0.0
    assert score("format", "a" * 5_000, {}, pattern="(?:a|aa|a?)+b", timeout=0.5) == 0.0
    assert score("regex", "<answer>1</answer>", {"answer": "1"}, pattern="(?s)<answer>(.*?)</answer>") == 1.0


def test_format() -> None:
    right = "<think>a\nb</think>\n<answer>c</answer>"
    assert score("format", right, {}) == 1.0
    for wrong in (f"x{right}", f"{right}x", "<answer>c</answer>", f"<think>{right}", f"{right}{right}", ""):
        assert score("format", wrong, {}) == 0.0
    assert score("format", "ab\nc", {}, pattern="a.*c") == 1.0


def test_length() -> None:
    for tokens, expected in ((0, 1.0), (100, 1.0), (125, 0.5), (150, 0.0), (900, 0.0)):
        assert score("length", "", {}, tokens=tokens, target=100, width=50) == expected
    for tokens, expected in ((100, 1.0), (75, 0.5), (110, 0.8), (0, 0.0)):
        got = score("length", "", {}, tokens=tokens, target=100, width=50, shorter_is_fine=False)
        assert got == pytest.approx(expected)


def test_overlong() -> None:
    for tokens, expected in ((0, 0.0), (80, 0.0), (85, -0.5), (100, -2.0), (120, -2.0)):
        args = {"max_response_length": 100, "buffer_len": 20, "penalty_factor": 2.0}
        assert score("overlong", "", {}, tokens=tokens, **args) == expected


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("regex", {"pattern": "("}, "pattern = '(' is no regular expression: missing ) at position 1"),
        ("regex", {"pattern": "a"}, "pattern = 'a' needs 1 group in brackets, and has 0"),
        ("regex", {"pattern": 5}, "pattern = 5: input should be a valid string"),
        ("regex", {"pattern": "(a)", "compare": "no"}, "compare = 'no': input should be a valid boolean"),
        ("format", {"pattern": "*"}, "pattern = '*' is no regular expression: nothing to repeat at position 0"),
        ("length", {"target": -1, "width": 5}, "target = -1 must be tokens, 0 or more"),
        ("length", {"target": 1.5, "width": 5}, "target = 1.5: input should be a valid integer"),
        ("overlong", {"max_response_length": 5, "buffer_len": 6}, "buffer_len = 6 must be 1 to max_response_length"),
        ("multiple_choice", {"choices": "ABA"}, "choices = 'ABA' must be different capital letters, such as ABCD"),
        ("math_verify", {"timeout": 0}, "timeout = 0 must be seconds, more than 0"),
        ("regex", {"pattern": "(a)", "timeout": -1.0}, "timeout = -1.0 must be seconds, more than 0"),
        ("reasoning_gym", {"timeout": 0.0}, "timeout = 0.0 must be seconds, more than 0"),
        ("reasoning_gym", {"isolation": "none"}, "isolation = 'none': input should be 'namespaces' or 'process'"),
        ("math_verify", {"boxed_only": 1}, "boxed_only = 1: input should be a valid boolean"),
        ("code", {"wall": 0}, "limit wall = 0 must be finite and more than 0"),
        ("code", {"isolation": "none"}, "isolation = 'none': input should be 'namespaces' or 'process'"),
    ],
)
def test_arguments_that_make_no_sense(name: str, args: dict[str, Any], said: str) -> None:
    check = load_reward(name).check_args
    assert check is not None
    with pytest.raises(ValueError) as refusal:
        check(**args)
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)


GYM = {"data_source": "chain_sum", "question": "1 + 1", "metadata": {}}
REFUSED_ROWS = {
    "code": [{"answer": "1"}, {"tests": None}, {"tests": 5}],
    "exact_match": [{}, {"answer": None}, {"answer": "  \n"}, {"answer": math.nan}, {"answer": ["1"]}, {"answer": {}}],
    "gsm8k": [{}, {"answer": None}, {"answer": "eighteen"}, {"answer": "#### "}, {"answer": ""}, {"answer": [18]}],
    "math_verify": [{}, {"answer": None}, {"answer": ""}, {"answer": "$$"}, {"answer": "?"}, {"answer": [5]}],
    "multiple_choice": [{}, {"answer": None}, {"answer": "E"}, {"answer": 4}, {"answer": "AB"}, {"answer": True}],
    "reasoning_gym": [{}, *({**GYM, "answer": wrong} for wrong in (None, 2, ["2"], {"a": "2"}, True, ""))],
    "regex": [{}, {"answer": None}, {"answer": " "}, {"answer": {"a": 1}}],
}
"""Of each verifier that reads a row, rows that it cannot score any response to."""
READING_NO_ROW = {"environment", "format", "http", "length", "openai_judge", "overlong"}


def test_every_verifier_is_in_the_table() -> None:
    assert REFUSED_ROWS.keys() | READING_NO_ROW == set(names()) and not REFUSED_ROWS.keys() & READING_NO_ROW


@pytest.mark.parametrize("name", REFUSED_ROWS)
def test_rows_that_cannot_be_scored_are_refused_before_a_run(name: str) -> None:
    asked = ((name, (), "{}"),)
    for row in REFUSED_ROWS[name]:
        said = refusal_of(row, "", asked)
        assert said.startswith(f"reward {name} ") and "\n" not in said, row


def test_arguments_say_which_rows_can_be_scored() -> None:
    assert refusal_of({"answer": "E"}, "", (("multiple_choice", (), '{"choices": "ABCDE"}'),)) == ""
    assert refusal_of({"answer": "E"}, "", (("multiple_choice", (), '{"choices": "ABC"}'),)) == (
        "reward multiple_choice needs one of the choices ABC as the answer, or its number from 0, not 'E'"
    )
    assert refusal_of({"answer": None}, "", (("regex", (), '{"pattern": "a", "compare": false}'),)) == ""


def test_every_reward_says_what_it_does() -> None:
    assert len(names()) == 13
    for name in names():
        lines = (load_reward(name).function.__doc__ or "").splitlines()
        assert 20 < len(lines[0]) < 120 and lines[0].endswith((".", ":"))


def test_rewards_need_no_torch() -> None:
    code = "import sys, megarl.rewards; assert 'torch' not in sys.modules and 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---------------------------------------------------------------------------------------------------- code

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5 5", "output": "15  \n\n"}]


def block(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.mark.parametrize(
    ("response", "tests", "expected"),
    [
        (ADD, ASSERTS, 1),
        (ADD, "\n".join(ASSERTS), 1),
        (ADD, json.dumps(ASSERTS), 1),
        (SUM, PAIRS, 1),
        (SUM, json.dumps(PAIRS), 1),
        (SUM, {"inputs": ["1 2", "3"], "outputs": ["3", "3"]}, 1),
        (block("print(3)") + "\n" + SUM, PAIRS, 1),
        (SUM + "\n" + block("print(3)"), PAIRS, 0),
        (ADD, [*ASSERTS, "assert add(1, 1) == 3"], 0),
        ("def add(a, b): return a + b", ASSERTS, 0),
        ("```python\ndef add(a, b): return a + b", ASSERTS, 0),
        (block("import sys; sys.exit(0)"), ASSERTS, 0),
        (block("import os; os._exit(0)"), ASSERTS, 0),
        (block("def add(a, b): raise SystemExit(0)"), ASSERTS, 0),
        (block("def add(a, b):"), ASSERTS, 0),
        (block("print('1' * 99)\ndef add(a, b): return 0"), ASSERTS, 0),
        (block("print(3); 1 / 0"), [{"input": "", "output": "3"}], 0),
        (block("print('''```''')\nprint(input())"), [{"input": "x", "output": "```\nx"}], 1),
        (block("if __name__ == '__main__':\n    print(input())"), [{"input": "x", "output": "x"}], 1),
    ],
)
def test_code(response: str, tests: Any, expected: float) -> None:
    got = score("code", response, {"tests": tests})
    assert got["score"] == expected


def test_code_in_part() -> None:
    tests = [*ASSERTS, "assert add(1, 1) == 3", "assert subtract(1, 1) == 0"]
    assert score("code", ADD, {"tests": tests}, partial=True)["score"] == 0.5
    wrong = [PAIRS[0], {"input": "1", "output": "2"}, {"input": "x", "output": "0"}, PAIRS[1]]
    got = score("code", SUM, {"tests": wrong}, partial=True)
    assert got == {"score": 0.5, "tests_passed": 0.5, "timed_out": 0.0, "block": 1.0}
    assert score("code", "none", {"tests": ASSERTS}) == {
        "score": 0.0,
        "tests_passed": 0.0,
        "timed_out": 0.0,
        "block": 0.0,
    }


def test_code_with_an_entry_point() -> None:
    tests = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"
    assert score("code", ADD, {"tests": tests, "entry_point": "add"})["score"] == 1.0
    assert score("code", ADD, {"tests": tests, "entry_point": "plus"})["score"] == 0.0
    assert score("code", block("add = max"), {"tests": tests, "entry_point": "add"})["score"] == 0.0


def test_code_without_end() -> None:
    got = score("code", block("while True: pass"), {"tests": PAIRS}, wall=0.5)
    assert got == {"score": 0.0, "tests_passed": 0.0, "timed_out": 1.0, "block": 1.0}
    assert score("code", block("x = 'x' * (9 << 30)"), {"tests": ASSERTS})["timed_out"] == 0.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": ""}, "needs a column 'tests'; the row has answer"),
        ({"tests": []}, "needs tests in column 'tests': a list of"),
        ({"tests": None}, "needs tests in column 'tests': a list of"),
        ({"tests": [{"input": "1"}]}, "needs tests in column 'tests': a list of"),
        ({"tests": "[1, "}, "needs JSON or asserts in column 'tests': Expecting value"),
        ({"tests": ["assert f(1 = 2"]}, "needs Python in column 'tests': "),
        ({"tests": "-" * 200_000 + "1"}, "needs Python in column 'tests': "),
        ({"tests": "[" * 200_000}, "needs JSON or asserts in column 'tests': "),
        ({"tests": "(" * 200_000}, "needs Python in column 'tests': "),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "needs as many outputs as inputs in column 'tests'"),
        ({"tests": ASSERTS, "entry_point": "a b"}, "needs a function's name in column 'entry_point', not 'a b'"),
    ],
)
def test_rows_that_code_cannot_score(row: dict[str, Any], said: str) -> None:
    check = load_reward("code").check_row
    assert check is not None
    with pytest.raises(ValueError) as refusal:
        check(row)
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)


def test_blocks() -> None:
    assert last_block("```py\na\n```\ntext\n```Python3\nb\n```") == "b\n"
    assert last_block("```\na\n```") is None
    assert read_tests('["assert True"]') == ["assert True"]


CHOICES = [
    ("B", "\\boxed{\\textbf{(B)}\\ 5}", 1),
    ("B", "\\boxed{\\text{B. Paris}}", 1),
    ("B", "<answer>B. Paris</answer>", 1),
    ("B", "<answer>**B**</answer>", 1),
    ("B", "**B**", 1),
    ("B", "**Answer**: B", 1),
    ("B", "The correct option is B", 1),
    ("B", "The answer is option B", 1),
    ("B", "Answer: B\n\nA is wrong because", 1),
    ("B", "The answer is B. A closer look", 1),
    ("B", "The answer is B; C is wrong", 0),
    ("B", "Answer: B (A is a distractor)", 1),
    ("B", "Answer: B is not correct; it is C", 0),
    ("B", "The wrong answer is B", 0),
    ("B", "Answer: B or option C", 0),
    ("B", "The answer is A or B", 0),
    ("B", "\\boxed{B}", 1),
    ("B", "\\boxed{\\text{B}}", 1),
    ("B", "\\boxed{A, B}", 0),
    ("B", "<answer>B</answer>", 1),
    ("B", "<answer>A or B</answer>", 0),
    ("B", "B", 1),
    ("B", "(b)", 1),
    ("B", "B.", 1),
    ("B", "\\boxed{B or C}", 0),
    ("B", "\\boxed{(A) or (B)}", 0),
    ("B", "Answer: (B) and (C)", 0),
    ("A", "A closer look shows B", 0),
    ("A", "The answer is A closer", 1),
    ("B", "\\boxed{(B) and (C)}", 0),
    ("B", "\\boxed{B, C}", 0),
    ("B", "Answer: A, B", 0),
    ("B", "answer: B, since A is false", 1),
]
GRADES = [
    ("18", "#### 18 and a half", 0),
    ("18", "#### 18 squared", 0),
    ("18", "#### 18 minus one", 0),
    ("18", "#### 18 trillionths", 0),
    ("18", "#### 18 bn", 0),
    ("18", "#### 18 ½", 0),
    ("18", "#### **18**", 1),
    ("18", "#### \\boxed{18}", 1),
    ("18", "#### \\$18", 1),
    ("18", "#### €18", 1),
    ("18", "#### 18", 1),
    ("18", "#### $18 per day", 1),
    ("-18", "#### −18", 1),
    ("18", "#### 18 or 19", 0),
    ("18", "#### 36/2", 0),
    ("18", "#### 18.", 1),
    ("1200", "#### 1,200.0", 1),
    ("18", "#### 18 kg", 1),
    ("18", "#### 18 apples a day", 1),
    ("18", "#### 18 million", 0),
]


@pytest.mark.parametrize(("answer", "response", "expected"), CHOICES)
def test_choices_as_models_write_them(answer: str, response: str, expected: int) -> None:
    assert score("multiple_choice", response, {"answer": answer}) == expected


@pytest.mark.parametrize(("answer", "response", "expected"), GRADES)
def test_grades_as_models_write_them(answer: str, response: str, expected: int) -> None:
    assert score("gsm8k", response, {"answer": answer}) == expected


FENCE = "```"
BLOCKS = [
    (f"<answer>\n{FENCE}python\nx\n{FENCE}</answer>", "x\n"),
    (f"<answer>{FENCE}python\nx\n{FENCE}\n</answer>", "x\n"),
    (f"{FENCE}python\nbad\nand so on\n{FENCE}python\ngood\n{FENCE}", "good\n"),
    (f"{FENCE}`python\nx\n{FENCE}`", "x\n"),
    (f"{FENCE}python\nx\n{FENCE}.", "x\n"),
    (f'{FENCE}python title="a.py"\nx\n{FENCE}', "x\n"),
    (f'{FENCE}python\n"""\n{FENCE}\na\n{FENCE}\n"""\n{FENCE}', f'"""\n{FENCE}\na\n{FENCE}\n"""\n'),
    (f'{FENCE}python\nx = 1  # """\n{FENCE}\nso', 'x = 1  # """\n'),
    (f"{FENCE}python\nx", None),
    (f"{FENCE}python\na\n{FENCE}\n{FENCE}python\nb", "a\n"),
]


@pytest.mark.parametrize(("response", "block"), BLOCKS)
def test_fences_as_models_write_them(response: str, block: str | None) -> None:
    from megarl.rewards.code import last_block

    assert last_block(response) == block


def test_a_case_without_tests_is_refused() -> None:
    row = {"tests": "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): f(2)"}
    check_row = load_reward("code").check_row
    assert check_row is not None
    with pytest.raises(ValueError, match="needs tests in column 'tests' that run"):
        check_row(row)

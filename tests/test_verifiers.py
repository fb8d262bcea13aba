"""Rewards that compare, match, measure and run what a response holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.rewards import load_reward
from megarl.rewards.code import last_block, read_tests
from megarl.rewards.deadline import DeadlinePassed, call_within
from megarl.rewards.math_process import same_value
from megarl.rewards.math_verify import last_boxed, math_verify
from megarl.rewards.registry import names

ROOT = Path(__file__).parents[1]

MATH = [
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
    (r"\boxed{1/3}", r"\frac{1}{3}", 1),
    (r"$$\boxed{-\frac{3}{4}}$$", "-0.75", 1),
    (r"\boxed{0.333}", r"\frac13", 0),
    (r"first \boxed{3}, no, \boxed{4}", "4", 1),
    (r"first \boxed{4}, no, \boxed{3}", "4", 0),
    ("The answer is 42", "42", 1),
    ("The answer is 41", "42", 0),
    (r"\boxed{7}", 7, 1),
    (r"\boxed{1.0}", "1", 1),
    (r"\boxed{1,234,567}", "1234567", 1),
    (r"\boxed{1\times10^{3}}", "1000", 1),
    (r"\boxed{(1,2]}", "(1,2]", 1),
    (r"\boxed{[1,2]}", "(1,2]", 0),
    (r"\boxed{(-\infty,3)\cup(5,\infty)}", r"(-\infty, 3) \cup (5, \infty)", 1),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", 1),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}", 0),
    (r"\boxed{(3,4)}", "(3, 4)", 1),
    (r"\boxed{(4,3)}", "(3,4)", 0),
    (r"\boxed{10\text{ cm}}", "10", 1),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{0.5}", r"50\%", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{3+2i}", "2i+3", 1),
    (r"\boxed{\pi}", "3.14", 0),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    (r"\boxed{\text{B}}", "B", 1),
    (r"\boxed{B}", "C", 0),
    (r"\boxed{\frac{1}{0}}", "5", 0),
    (r"\boxed{\frac{1}{2}}", r"so it is \boxed{\frac{2}{4}}", 1),
    ("", "5", 0),
    ("I do not know", "5", 0),
    (r"\boxed{}", "5", 0),
    (r"\boxed{5", "5", 0),
]


@pytest.mark.parametrize(("response", "answer", "score"), MATH)
def test_math_verify(response: str, answer: object, score: float) -> None:
    assert math_verify(response, {"answer": answer}) == score


@pytest.mark.parametrize(
    "expression",
    ["9^{9^{9}}", r"\frac{1}{9^{9^{9}}}", "100000000!", r"\binom{100000000}{50000000}", "(" * 3000 + "1" + ")" * 3000],
    ids=["power", "fraction", "factorial", "binomial", "brackets"],
)
def test_mathematics_without_end_scores_0_in_time(expression: str) -> None:
    same_value("1", "$1$", timeout=60)  # the process is there
    start = time.monotonic()
    assert math_verify(rf"\boxed{{{expression}}}", {"answer": "0"}, timeout=0.5) == 0.0
    assert time.monotonic() - start < 3
    assert math_verify(r"\boxed{2}", {"answer": "2.0"}) == 1.0


def test_only_boxed_answers_count() -> None:
    assert math_verify("it is 42", {"answer": "42"}, boxed_only=True) == 0.0
    assert math_verify(r"it is \boxed{42}", {"answer": "42"}, boxed_only=True) == 1.0


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


def test_a_row_without_mathematics_is_said() -> None:
    with pytest.raises(ValueError, match=r"^finds nothing mathematical in the row's answer '\$\$'$"):
        math_verify("1", {"answer": "$$"})


def test_a_deadline_leaves_no_answer_for_the_next_call() -> None:
    with pytest.raises(DeadlinePassed):
        call_within(0.3, lambda: same_value("0", r"$\boxed{9^{9^{9}}}$", timeout=60))
    assert same_value("2", "$2.0$", timeout=60) is True
    assert same_value("2", "$3$", timeout=60) is False


def test_its_process_ends_with_the_caller() -> None:
    code = """
import os, psutil, sys
from megarl.rewards.math_process import same_value
assert same_value("2", "$2.0$", timeout=60)
(child,) = psutil.Process().children()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    until = time.monotonic() + 10
    while runs(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not runs(int(done.stdout))


def runs(pid: int) -> bool:
    """Whether the process goes on; it may wait to be waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def score(name: str, response: str, row: dict[str, Any], **args: Any) -> Any:
    reward = load_reward(name)
    if reward.check_row is not None:
        reward.check_row(row)
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
    began = time.monotonic()
    assert score(name, response.format(*[blank * 2000] * 3), {"answer": "1"}) == 0.0
    assert time.monotonic() - began < 5


def test_regex() -> None:
    pattern = "(?s)<answer>(.*?)</answer>"
    assert score("regex", "<answer>1</answer><answer> 12\n</answer>", {"answer": 12}, pattern=pattern) == 1.0
    assert score("regex", "<answer>12</answer><answer>1</answer>", {"answer": 12}, pattern=pattern) == 0.0
    assert score("regex", "12", {"answer": 12}, pattern=pattern) == 0.0
    assert score("regex", "so: 7", {}, pattern=r"\d", compare=False) == 1.0
    assert score("regex", "so:", {}, pattern=r"\d", compare=False) == 0.0


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
        ("regex", {"pattern": "("}, "pattern = '(' is no regular expression: missing ), unterminated subpattern at"),
        ("regex", {"pattern": "a"}, "pattern = 'a' needs 1 group in brackets, and has 0"),
        ("regex", {"pattern": 5}, "pattern = 5: input should be a valid string"),
        ("regex", {"pattern": "(a)", "compare": "no"}, "compare = 'no': input should be a valid boolean"),
        ("format", {"pattern": "*"}, "pattern = '*' is no regular expression: nothing to repeat at position 0"),
        ("length", {"target": -1, "width": 5}, "target = -1 must be tokens, 0 or more"),
        ("length", {"target": 1.5, "width": 5}, "target = 1.5: input should be a valid integer"),
        ("overlong", {"max_response_length": 5, "buffer_len": 6}, "buffer_len = 6 must be 1 to max_response_length"),
        ("multiple_choice", {"choices": "ABA"}, "choices = 'ABA' must be different capital letters, such as ABCD"),
        ("math_verify", {"timeout": 0}, "timeout = 0 must be seconds, more than 0"),
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

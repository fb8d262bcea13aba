"""Runs the program in a response against the row's tests, in a sandbox."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial as partial_of
from typing import Any, Literal

from megarl.isolation.launch import GRACE
from megarl.rewards.registry import register
from megarl.rewards.sandbox import Examination, Limits, Outcome, check_isolation, run_python, run_tests
from megarl.rewards.subjects import subjects_of
from megarl.workers.deadline import seconds_left

_OPENING = re.compile(r"(?:<\w+>\s*)*(`{3,}) ?(?:python|py)3?(?: [^`]*)?", re.IGNORECASE)
_CLOSING = re.compile(r"(`{3,})(?:\s*</\w+>)*[.]?")
_PAIR = ("input", "output")
_ROOM = 1 << 16  # bytes that a program may write beside what it should


def _check_args(*, partial: bool, isolation: str, site_packages: bool, **limits: Any) -> None:
    Limits(**limits)
    if isolation == "namespaces":
        check_isolation()


def _check_row(row: Mapping[str, Any]) -> None:
    if "tests" not in row:
        raise ValueError(f"needs a column 'tests'; the row has {', '.join(row)}")
    tests = read_tests(row["tests"])
    entry_point = row.get("entry_point")
    if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise ValueError(f"needs a function's name in column 'entry_point', not {entry_point!r:.80}")
    for test in tests:
        if isinstance(test, str):
            try:
                compile(test, "tests", "exec")
            except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
                reason = str(e) or "it is nested too deeply"
                raise ValueError(f"needs Python in column 'tests': {reason}") from e
    if isinstance(tests[0], str):
        subjects_of(tests, entry_point)


@register("code", check_row=_check_row, check_args=_check_args)
def code(
    response: str,
    row: Mapping[str, Any],
    *,
    partial: bool = False,
    wall: float = 10.0,
    cpu: float = 10.0,
    memory: int = 1024,
    disk: int = 64,
    processes: int = 32,
    output: int = 1 << 20,
    isolation: Literal["namespaces", "process"] = "namespaces",
    site_packages: bool = False,
) -> dict[str, float]:
    """Run the last ```python block of the response against column `tests`; 1 if all pass, without a block 0.

    `tests` is one of these, or JSON of it:
    - [{"input": text, "output": text}, ...] or {"inputs": [...], "outputs": [...]}: what the program reads and should
      write, blanks at the ends of lines aside (APPS, TACO, CodeContests). Each is a run of the program.
    - ["assert f(1) == 2", ...]: each is a test; names that it does not define are the program's (MBPP).
    - text with asserts: one test; with column `entry_point`, its `check(f)` is called with that function (HumanEval).
      What else a check calls belongs into the text: a name that it lacks is the response's to define. Functions
      `test_...` and classes `Test...` that nothing calls, and those of unittest, are run.

    Asserts run in a process of their own, and ask the program's for what `f(1)` gives: the program sees arguments and
    no test. What it answers is data; an object of a class of its own is equal to no value that a test holds.

    Args:
        partial: the score is the share of the tests that pass.
        wall, cpu: seconds of a run. All runs of a response end before `reward.timeout` is over; what is left then
            counts as timed out.
        memory, disk: MiB; disk is what /tmp holds.
        processes: with threads.
        output: bytes; more where a test expects more.
        site_packages: programs and tests see the packages that are installed for this Python; answers may lie there.
        isolation: "process" has limits alone, and the program has your files and your network: unsafe.

    Returns:
        score; tests_passed, a share; timed_out, the share of runs; block, whether the response has one.

    Raises:
        SandboxError: the sandbox cannot be made.
    """
    limits = Limits(wall=wall, cpu=cpu, memory=memory, disk=disk, processes=processes, output=output)
    tests = read_tests(row["tests"])
    source = last_block(response)
    folders = [os.path.realpath(path) for path in sys.path if path.endswith("-packages")] if site_packages else []
    if source is None:
        return {"score": 0.0, "tests_passed": 0.0, "timed_out": 0.0, "block": 0.0}
    runs = _Runs(source, limits, {"isolation": isolation, "folders": folders}, whole=not partial)
    asserts = isinstance(tests[0], str)
    passed = runs.of_asserts(tests, row.get("entry_point")) if asserts else runs.of_texts(tests)
    share = passed / len(tests)
    late = sum(outcome.ended == "time" for outcome in runs.outcomes) / len(runs.outcomes)
    score = share if partial else float(passed == len(tests))
    return {"score": score, "tests_passed": share, "timed_out": late, "block": 1.0}


class _Runs:
    """Runs a response's program until its tests are over, or the time that the response has.

    Attributes:
        outcomes: how each run ended.
    """

    def __init__(self, source: str, limits: Limits, sandbox: Mapping[str, Any], *, whole: bool) -> None:
        """
        Args:
            sandbox: arguments of `run_python` and `run_tests`.
            whole: stop at the first test that fails.
        """
        self._source, self._limits, self._sandbox, self._whole = source, limits, sandbox, whole
        left = seconds_left()
        self._end = time.monotonic() + max(left - 2 * GRACE, left / 2)
        self.outcomes: list[Outcome] = []

    def of_asserts(self, tests: list[str], entry_point: str | None) -> int:
        """Have tests ask the program; return how many pass."""
        subjects, functions = subjects_of(tests, entry_point)
        examination = Examination(
            tests=tests, subjects=subjects, functions=functions, entry_point=entry_point, whole=self._whole
        )
        results: list[bool] = []

        def run(limits: Limits) -> Outcome:
            outcome, results[:] = run_tests(self._source, examination, limits=limits, **self._sandbox)
            return outcome

        return sum(results) if self._run(run, self._limits).ended == "exit" else 0

    def of_texts(self, tests: list[Mapping[str, str]]) -> int:
        """Run the program on each input; return for how many it writes the output."""
        passed = 0
        for test in tests:
            room = max(self._limits.output, 2 * len(test["output"].encode()) + _ROOM)
            outcome = self._run(partial_of(self._written, test["input"]), replace(self._limits, output=room))
            right = outcome.ended == "exit" and outcome.exit_code == 0
            passed += right and _lines(outcome.stdout) == _lines(test["output"])
            if self._whole and passed < len(self.outcomes):
                break
        return passed

    def _written(self, stdin: str, limits: Limits) -> Outcome:
        return run_python(self._source, stdin=stdin, limits=limits, **self._sandbox)

    def _run(self, run: Callable[[Limits], Outcome], limits: Limits) -> Outcome:
        """Run the program within the time that is left.

        It is run once more if it was killed from outside, where no limit was reached: the response may be right. If the
        second run is killed as well, the response counts as wrong.
        """
        outcome = Outcome(stdout="", stderr="", ended="time", exit_code=None, seconds=0.0, cpu_seconds=None)
        for _ in range(2):
            left = self._end - time.monotonic()
            if left <= 0:
                break
            outcome = run(replace(limits, wall=min(limits.wall, left)))
            if outcome.ended != "killed":
                break
        self.outcomes.append(outcome)
        return outcome


def last_block(response: str) -> str | None:
    """Return the text of the last ```python block; None without one, or if it does not end.

    A fence within a text of three quotation marks is the program's. A block that another one follows before its end was
    never ended.
    """
    last, within_quotes = None, None  # the second: up to a fence that a stray quotation mark has made text
    block: list[str] = []
    fence = ""  # of the block that is open
    indentation = 0  # of the fence, which a block in a list's item has too
    quoted = {'"""': False, "'''": False}
    for line in response.splitlines(keepends=True):
        opening, closing = _OPENING.fullmatch(line.strip()), _CLOSING.fullmatch(line.strip())
        if opening is not None and not any(quoted.values()):
            fence, block, within_quotes = opening[1], [], None
            indentation = len(line) - len(line.lstrip(" "))
        elif fence and closing is not None and len(closing[1]) >= len(fence) and not any(quoted.values()):
            last, fence = "".join(block), ""
        elif fence:
            if closing is not None and len(closing[1]) >= len(fence) and within_quotes is None:
                within_quotes = "".join(block)
            block.append(line[min(indentation, len(line) - len(line.lstrip(" "))) :])
            for mark in quoted:
                quoted[mark] ^= line.count(mark) % 2 == 1
        if not fence:
            quoted = dict.fromkeys(quoted, False)
    return within_quotes if fence and within_quotes is not None else last


def read_tests(column: Any) -> list[Any]:
    """Return the tests of a column as a list of texts, or of {"input", "output"}.

    Raises:
        ValueError: the column has another form, or no tests.
    """
    if isinstance(column, str) and column.lstrip()[:1] in ("[", "{"):
        try:
            column = json.loads(column)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"needs JSON or asserts in column 'tests': {e}") from e
    if isinstance(column, str):
        column = [column]
    if isinstance(column, Mapping) and isinstance(column.get("inputs"), list | tuple):
        column = list(_pairs(column))
    tests = list(column) if isinstance(column, list | tuple) else []
    if tests and all(isinstance(test, str) and test.strip() for test in tests):
        return tests
    if tests and all(isinstance(test, Mapping) and all(isinstance(test.get(k), str) for k in _PAIR) for test in tests):
        return tests
    raise ValueError(
        'needs tests in column \'tests\': a list of {"input": text, "output": text}, a list of asserts, or a text of '
        f"them, not {column!r:.80}"
    )


def _pairs(column: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    inputs, outputs = column["inputs"], column.get("outputs")
    if not isinstance(outputs, list | tuple) or len(outputs) != len(inputs):
        raise ValueError("needs as many outputs as inputs in column 'tests'")
    for text, expected in zip(inputs, outputs, strict=True):
        yield {"input": text, "output": expected}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

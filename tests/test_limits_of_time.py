"""No test fails on a machine because that is slow: what these tests' sources may say about time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import ROOT

LEAST = 60.0
"""Seconds: a limit is for what hangs. Less is a statement about the machine, which nobody knows."""
CLOCKS = {f"time.{clock}" for clock in ("monotonic", "perf_counter", "process_time", "thread_time", "time")}
CLOCKS |= {"os.times"}
WAITS = {"wait", "join", "communicate", "run", "urlopen", "create_connection", "check_output", "result", "acquire"}
NO_LIMITS = {"service.stop.wait(0.05)"}
"""Pauses between what is done again and again."""
POLLS = {"seconds", "within", "timeout"}
"""Parameters of functions in tests which wait until something is there."""


def clocked(node: ast.AST, names: set[str]) -> bool:
    """Whether a clock was read for a value."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            return True
        if isinstance(part, ast.Call) and ast.unparse(part.func) in CLOCKS:
            return True
    return False


def constants(node: ast.AST) -> list[float]:
    """The numbers in an expression, those within calls of it left out."""
    if isinstance(node, ast.Constant):
        return [float(node.value)] if isinstance(node.value, int | float) and not isinstance(node.value, bool) else []
    if isinstance(node, ast.Call | ast.Subscript):
        return []
    return [number for child in ast.iter_child_nodes(node) for number in constants(child)]


def times_read(function: ast.AST) -> set[str]:
    """Names of a function that hold what was read from a clock, or what was computed from that."""
    names: set[str] = set()
    for node in ast.walk(function):  # in the order of the lines, within a block
        for target in node.targets if isinstance(node, ast.Assign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]
            names |= {t.id for t, v in pairs if isinstance(t, ast.Name) and clocked(v, names)}
    return names


def short_limits(source: str) -> Iterator[tuple[int, str]]:
    """Lines that take something for wrong because less than a minute has gone by, and what they hold."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        names = times_read(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                yield from ((at.lineno, ast.unparse(at)) for at in ast.walk(node.test) if most_seconds(at, names))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and clocked(node, set()):
                yield from ((node.lineno, ast.unparse(node)) for n in constants(node) if 0 < n < LEAST)
        wanted = [*function.args.args, *function.args.kwonlyargs]
        filled = [None] * (len(function.args.args) - len(function.args.defaults)) + function.args.defaults
        for argument, default in zip(wanted, filled + function.args.kw_defaults, strict=True):
            if argument.arg in POLLS and default is not None and any(0 < n < LEAST for n in constants(default)):
                yield default.lineno, f"{function.name}({argument.arg}={ast.unparse(default)})"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in WAITS | {"until", "eventually", "wait_until_gone"}:
            given = [k.value for k in node.keywords if k.arg in POLLS]
            given += node.args[-1:] if name_of(node.func) not in ("run", "urlopen", "create_connection") else []
            if any(isinstance(value, ast.Constant) and 0 < n < LEAST for value in given for n in constants(value)):
                yield node.lineno, ast.unparse(node)


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def most_seconds(node: ast.AST, names: set[str]) -> bool:
    """Whether a comparison holds a time that was measured against less than a minute, from above."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    for low, operator, high in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Gt | ast.GtE):
            low, high = high, low
        elif not isinstance(operator, ast.Lt | ast.LtE):
            continue
        if clocked(low, names) and any(n < LEAST for n in constants(high)):
            return True
    return False


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("    began = time.monotonic()\n    f()\n    assert time.monotonic() - began < 5", 1),
        ("    began, x = time.perf_counter(), 1\n    took = time.perf_counter() - began\n    assert 1 < took < 8", 1),
        ("    spent = os.times()\n    assert 0.5 > spent.user + spent.system", 1),
        ("    until = time.monotonic() + 20\n    while time.monotonic() < until:\n        f()", 1),
        ("    thread.join(2)", 1),
        ("    process.communicate(timeout=20)", 1),
        ("    until(lambda: there, 10)", 1),
        ("    began = time.monotonic()\n    f()\n    assert time.monotonic() - began >= 1.0", 0),
        ("    until = time.monotonic() + 120\n    while time.monotonic() < until:\n        f()", 0),
        ("    process.communicate(timeout=300)\n    assert ', '.join(x) and len(x) < 5", 0),
        ("    pool_of(timeout=0.5)", 0),  # the program's own limit, which is tried
    ],
)
def test_a_limit_is_found(body: str, found: int) -> None:
    assert len(list(short_limits(f"def test():\n{body}\n"))) == found


def test_tests_hold_on_a_slow_machine() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, text in short_limits(path.read_text(encoding="utf-8"))
        if path.name != Path(__file__).name and text not in NO_LIMITS
    }
    assert found == {}, "show what happened first, or wait for minutes; speed is a figure of a benchmark"

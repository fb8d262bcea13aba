"""Calls the verifiers of reasoning-gym."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from megarl.rewards.outside.guards import EVALUATED, GUARDS, guarded, refusal
from megarl.rewards.reasoning_gym_json import decode

Verifier = Callable[[str, dict[str, Any]], float]
"""(response, entry) -> score."""

_DRAWING = {
    "matplotlib": (),
    "matplotlib.pyplot": (),
    "matplotlib.animation": (),
    "matplotlib.collections": (),
    "mpl_toolkits": (),
    "mpl_toolkits.mplot3d": ("Axes3D",),
}
_WITHOUT_OWN_ANSWER = ("intermediate_integration", "simple_integration")  # some are integrals that nobody has solved

_RUNNING = "eval exec compile parse_expr sympify S lambdify __import__ import_module loads load system Popen run"
EVALUATING = frozenset(_RUNNING.split())
"""Names of functions that run what they are given as code, or may."""

GENERATING = frozenset({"basic_arithmetic", "bf", "codeio", "propositional_logic"})
"""Tasks that evaluate what they themselves generate, and nothing of a response or a row; or name a parser so."""

HARMLESS = {"json.loads", "re.compile"}
"""Calls of such names that evaluate nothing."""


def prepare() -> None:
    """Import reasoning_gym, a hundred task generators, without its libraries that draw."""
    for name, classes in _DRAWING.items():  # imported by cellpylib, for what nobody calls; half of the time and memory
        module = sys.modules.setdefault(name, types.ModuleType(name))
        vars(module).update(dict.fromkeys(classes, object))
    import reasoning_gym  # noqa: F401


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one of these requests.

    - {"row": …, "response": text}: {"score": number}, or {"raised": true} if the verifier raises on the response
    - {"row": …}: {"refused": why}; empty if responses to the row can be scored
    """
    row = request["row"]
    if "response" not in request:
        return {"refused": _row_refusal(row)}
    task, entry = row["data_source"], _entry(row)
    if refusal(task, entry):
        return {"raised": True}
    response = guarded(task, request["response"].strip(), entry)
    if response is None:
        return {"score": 0.0}
    try:
        return {"score": float(verifier_of(task)(response, _entry(row)))}
    except Exception:
        return {"raised": True}


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    """Make the entry of a row anew for every call: verifiers change what they are given."""
    return {"question": row["question"], "answer": decode(row["answer"]), "metadata": decode(row["metadata"])}


def _row_refusal(row: Mapping[str, Any]) -> str:
    task = row["data_source"]
    try:
        verifier = verifier_of(task)
        entry = _entry(row)
        if not isinstance(entry["metadata"], dict):
            return f"needs an object in column 'metadata', not {type(row['metadata']).__name__}"
    except ValueError as e:
        return str(e)
    if why := _unguarded(task) or refusal(task, entry):
        return why
    answer = entry["answer"]
    if not isinstance(answer, str) and (answer is not None or not _names_no_answer(task)):
        return f"needs text in column 'answer', not {type(answer).__name__}"
    if answer is None or task in _WITHOUT_OWN_ANSWER:
        return ""
    given = guarded(task, answer, _entry(row))
    try:
        if given is not None and verifier(given, entry) > 0:
            return ""
    except Exception:
        pass
    return (
        f"the verifier of {task} does not accept the row's own answer: the row is not what "
        "tools/prepare_reasoning_gym.py wrote"
    )


@cache
def _names_no_answer(task: str) -> bool:
    """Tell whether the task has many right answers, and generates none."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=1, size=1)[0]["answer"] is None


@cache
def verifier_of(task: str) -> Verifier:
    """Return the score function of a task; raises ValueError if reasoning-gym has no task of that name.

    The function is kept: to make one, arc_agi and others read all their data.
    """
    import reasoning_gym

    try:
        return cast(Verifier, reasoning_gym.get_score_answer_fn(task))
    except ValueError as e:
        raise ValueError(f"finds no task of reasoning-gym called {task!r} (data_source)") from e


@cache
def _unguarded(task: str) -> str:
    """Say why a task of a newer reasoning-gym is refused: it evaluates text, and nothing is known of it here."""
    names = evaluating_calls(task)
    if not names or task in GUARDS or task in EVALUATED or task in GENERATING:
        return ""
    return (
        f"{task} may evaluate a response as code ({', '.join(sorted(names))}): this version of MegaRL does not call it"
    )


def evaluating_calls(task: str) -> set[str]:
    """Return the functions among `EVALUATING` that the module of a task calls."""
    from reasoning_gym.factory import DATASETS

    tree = ast.parse(inspect.getsource(sys.modules[DATASETS[task][0].__module__]))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {ast.unparse(call) for call in calls if isinstance(call, ast.Name | ast.Attribute)}
    return {name for name in names - HARMLESS if name.rpartition(".")[2] in EVALUATING}

"""Scores a response as the verifier of the reasoning-gym task does that the row was generated from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.isolation.launch import Isolation
from megarl.rewards.outsiders import check_outsiders, outsider, score_of, start_early
from megarl.rewards.reasoning_gym_compared import COMPARED
from megarl.rewards.registry import register
from megarl.workers.child import WorkerError
from megarl.workers.deadline import seconds_left

COLUMNS = ("data_source", "question", "answer", "metadata")
_LOOKING = 60.0  # seconds for a row
_process = partial(outsider, "megarl.rewards.outside.reasoning_gym:answer", ("reasoning-gym",))


def _check_row(row: Mapping[str, Any], *, isolation: Isolation = "namespaces") -> None:
    missing = [key for key in COLUMNS if key not in row]
    if missing:
        raise ValueError(f"needs the columns {', '.join(missing)}; the row has {', '.join(row)}")
    for key, kind in (("data_source", "a task's name"), ("question", "text")):
        if not isinstance(row[key], str):
            raise ValueError(f"needs {kind} in column {key!r}, not {type(row[key]).__name__}")
    if _compared(row["answer"], row):
        return
    try:
        columns = json.loads(json.dumps({key: row[key] for key in COLUMNS}))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"needs columns that tools/prepare_reasoning_gym.py writes: {e}") from e
    try:
        answer = _process(isolation).ask({"row": columns}, timeout=_LOOKING)
    except WorkerError as e:
        raise ValueError(f"cannot look at the row: {e}") from e
    why = answer.get("refused") if isinstance(answer, dict) else None
    if not isinstance(why, str):
        raise ValueError(f"holds a row that the verifier of {row['data_source']:.80} cannot read")
    if why:
        raise ValueError(why)


def _compared(response: str, row: Mapping[str, Any]) -> float | None:
    """Score a response where the task only compares texts or decimals; None: its verifier is to say."""
    compare, answer = COMPARED.get(row["data_source"]), row["answer"]
    return None if compare is None or not isinstance(answer, str) else compare(response.strip(), answer)


@register("reasoning_gym", check_row=_check_row, check_args=check_outsiders, prepare=partial(start_early, _process))
def reasoning_gym_score(
    response: str, row: Mapping[str, Any], *, timeout: float = 10.0, isolation: Isolation = "namespaces"
) -> float:
    """Return the task's own score of the response, 0 to 1.

    Tasks that only compare texts or decimals (`megarl.rewards.reasoning_gym_compared`) are scored here. The verifiers
    of all others run in a sandbox, as programs of `reward.name=code` do, and see no file but Python's library and their
    own packages. Those that evaluate a response as code (binary_matrix, countdown, intermediate_integration, n_queens,
    polynomial_multiplication, puzzle24, simple_integration, spiral_matrix, string_insertion) are given lists of
    literals or formulas of a few functions; any other response scores 0. coin_flip wants the probability to 1 %,
    game_of_life_halting "True" or "False", puzzle24 the row's numbers, number_sorting finite ones; a task of a newer
    reasoning-gym that evaluates text is refused. A response on which a verifier raises ("abc" where a number belongs),
    or which takes it longer than `timeout`, scores 0.

    Args:
        row: `data_source` (the task's name), `question`, `answer` and `metadata`, as
            `tools/prepare_reasoning_gym.py` writes them.
        timeout: seconds for one response.
        isolation: "process" has no sandbox, and verifiers have your files and your network: unsafe.

    Raises:
        ValueError: the verifier does not accept the row's own answer.
    """
    if (compared := _compared(response, row)) is not None:
        return compared
    columns = {key: row[key] for key in COLUMNS}
    answer = _process(isolation).ask({"row": columns, "response": response}, timeout=min(timeout, seconds_left() / 2))
    score = score_of(answer)
    if score is None and isinstance(answer, dict) and answer.get("raised") is True:
        _check_row(row, isolation=isolation)  # whose fault it is: the response has no part in this
    return score or 0.0

"""Programs that try to be paid for a task that they do not solve, and honest ones that must be paid."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from code_attacks import attacks
from code_solutions import solutions

from megarl.rewards import load_reward

ATTACKS, SOLUTIONS = list(attacks()), list(solutions())


def scores(named: list[tuple[str, str, dict[str, Any]]], wall: float) -> dict[str, float]:
    """The score of each, two at a time."""
    reward = load_reward("code")
    assert reward.check_row is not None
    for _, _, row in named:
        reward.check_row(row)

    def score(one: tuple[str, str, dict[str, Any]]) -> tuple[str, float]:
        name, program, row = one
        return name, reward(f"```python\n{program}\n```", row, wall=wall, memory=512)["score"]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return dict(threads.map(score, named))


def test_some_honest_programs_are_paid_and_some_others_are_not() -> None:
    assert {name: got for name, got in scores(SOLUTIONS[::20], 120.0).items() if got != 1.0} == {}
    assert {name: got for name, got in scores(ATTACKS[::13], 10.0).items() if got != 0.0} == {}


@pytest.mark.slow
def test_every_honest_program_is_paid() -> None:
    assert len(SOLUTIONS) >= 200 and len({name for name, *_ in SOLUTIONS}) == len(SOLUTIONS)
    assert {name: got for name, got in scores(SOLUTIONS, 120.0).items() if got != 1.0} == {}


@pytest.mark.slow
def test_no_program_pays_itself() -> None:
    assert len(ATTACKS) >= 60 and len({name for name, *_ in ATTACKS}) == len(ATTACKS)
    assert {name: got for name, got in scores(ATTACKS, 10.0).items() if got != 0.0} == {}

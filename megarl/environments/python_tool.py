"""Runs the program in <python>...</python> in the sandbox, and answers it by its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.environments.environment import Turn, blocks
from megarl.rewards.sandbox import Isolation, Limits, check_isolation, run_python


class PythonTool:
    """Answers the last program of a response; a response without one ends the episode.

    Args:
        answer: the observation; {output} stands for the output of the program.
        isolation: see `run_python`.
        limits: fields of `Limits`, for each program.
    """

    def __init__(self, *, answer: str = "{output}", isolation: Isolation = "namespaces", **limits: Any) -> None:
        if "{output}" not in answer:
            raise ValueError("answer must hold {output}")
        if isolation not in ("namespaces", "process"):
            raise ValueError(f"isolation = {isolation!r} must be namespaces or process")
        if isolation == "namespaces":
            check_isolation()
        self._answer, self._isolation = answer, isolation
        self._limits = Limits(**{"wall": 5.0, "cpu": 5.0, "memory": 512, **limits})

    def reset(self, row: Mapping[str, Any]) -> None:
        del row

    def step(self, response: str) -> Turn:
        programs = blocks(response, "python")
        if not programs:
            return Turn(done=True)
        outcome = run_python(programs[-1], limits=self._limits, isolation=self._isolation)
        output = outcome.stdout.strip()
        if outcome.ended != "exit":
            output = f"{output}\nerror: {outcome.ended}".strip()
        elif outcome.exit_code:
            output = f"{output}\n{outcome.stderr.strip().rpartition(chr(10))[2]}".strip()
        return Turn(observation=self._answer.replace("{output}", output))

    def close(self) -> None:
        pass

"""Plays the acts of a rehearsal: a run to its end, a run that loses a rank, the same run as it goes on."""

from __future__ import annotations

import filecmp
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.checkpoint.export_beside import HUGGINGFACE
from megarl.checkpoint.folder import checkpoints
from megarl.rehearsal.ranks import Ending, ForkedRanks
from megarl.rehearsal.small_run import SmallRun
from megarl.rollout.kinds import engine_kind
from megarl.telemetry.lines import complete_lines
from megarl.telemetry.metrics import TIMED
from megarl.telemetry.sinks.jsonl import METRICS_FILE, read_row

LAST_LINES = 15
"""Of what the ranks printed, shown if a rehearsal fails."""


class RehearsalFailed(Exception):
    """Says what did not work in a rehearsal, with the last lines that the ranks printed."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """Describes an act that went well.

    Attributes:
        outcome: its result in words.
    """

    name: str
    outcome: str
    seconds: float


class Rehearsal:
    """Plays the acts of a small run, one after the other."""

    def __init__(self, small: SmallRun, ranks: ForkedRanks, folder: str) -> None:
        self._small, self._ranks, self._folder = small, ranks, folder

    def acts(self) -> list[tuple[str, Callable[[], str]]]:
        """List the acts, by name; each returns its outcome, and raises RehearsalFailed."""
        last = self._small.config.trainer.world_size - 1
        return [
            ("the run, left alone", self._left_alone),
            (f"the run, rank {last} killed", self._kill),
            ("the same run goes on", self._go_on),
        ]

    def play(self, name: str, act: Callable[[], str]) -> Act:
        """Play an act, and measure its time."""
        start = time.monotonic()
        return Act(name=name, outcome=act(), seconds=time.monotonic() - start)

    def _left_alone(self) -> str:
        self._expect_end(self._run("alone"), "the run")
        newest = checkpoints(self._run_dir("alone"))
        if not newest or not os.path.isdir(os.path.join(newest[0].folder, HUGGINGFACE)):
            raise RehearsalFailed("the run left no checkpoint with an export")
        steps, saved = self._small.config.trainer.total_training_steps, _size(newest[0].folder)
        return f"{steps} steps, each saved and exported in {saved / 2**20:.1f} MiB"

    def _kill(self) -> str:
        ending = self._run("killed", killed=self._small.config.trainer.world_size - 1)
        if ending.code != -signal.SIGKILL:
            raise RehearsalFailed(_with_last_lines("the run ended before a rank could be killed", ending))
        return f"SIGKILL after a step; {checkpoints(self._run_dir('killed'))[0].position.name} is whole"

    def _go_on(self) -> str:
        begun = checkpoints(self._run_dir("killed"))[0].position.name
        ending = self._run("killed")
        self._expect_end(ending, "the run that goes on")
        if f"{begun}\n" not in ending.printed or "resuming from" not in ending.printed:
            raise RehearsalFailed(_with_last_lines(f"the run did not go on from {begun}", ending))
        config = self._small.config
        if config.environment.answers or not engine_kind(config.actor_rollout_ref.rollout.name).repeats:
            return f"from {begun} to the end; the numbers differ, as those of its engine or environment do"
        return f"from {begun}; {self._compared()}"

    def _compared(self) -> str:
        """Compare the killed run with the one that was left alone: metrics and weights."""
        alone, killed = (numbers(self._run_dir(name)) for name in ("alone", "killed"))
        if alone != killed:
            differing = [row["step"] for row, other in zip(alone, killed, strict=False) if row != other]
            raise RehearsalFailed(f"the numbers of the killed run differ, first at step {[*differing, 'the last'][0]}")
        left_alone, resumed = (
            os.path.join(checkpoints(self._run_dir(name))[0].folder, HUGGINGFACE) for name in ("alone", "killed")
        )
        files = [name for name in os.listdir(left_alone) if name.endswith(".safetensors")]
        _, other, unreadable = filecmp.cmpfiles(left_alone, resumed, files, shallow=False)
        if other or unreadable or not files:
            raise RehearsalFailed("the weights of the killed run differ from those of the run that was left alone")
        return f"the same numbers in {len(alone)} rows, the same weights"

    def _run(self, name: str, killed: int | None = None) -> Ending:
        words = [self._small.file, f"trainer.default_local_dir={self._run_dir(name)}"]
        return self._ranks.run(words, os.path.join(self._folder, f"{name}.log"), killed=killed)

    def _run_dir(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _expect_end(self, ending: Ending, what: str) -> None:
        if ending.code:
            raise RehearsalFailed(_with_last_lines(f"{what} failed: rank {ending.rank}, code {ending.code}", ending))


def numbers(run_dir: str) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics without what a clock decides."""
    rows = [row for line in complete_lines(os.path.join(run_dir, METRICS_FILE)) if (row := read_row(line)) is not None]
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def _with_last_lines(message: str, ending: Ending) -> str:
    lines = [f"  {line}" for line in ending.printed.splitlines() if line.strip()][-LAST_LINES:]
    return "\n".join([message, *lines])


def _size(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)

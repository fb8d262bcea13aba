"""Plays the trials of a search: each is a run of `megarl train`, whose metrics are watched while it trains."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from optuna.trial import Trial, TrialState

from megarl.processes import STOP_SIGNALS, die_with_parent, module_command, signals_handled
from megarl.telemetry.lines import complete_lines
from megarl.telemetry.sinks.jsonl import METRICS_FILE, read_row
from megarl.tuning.study import Trials
from megarl.tuning.sweep import SET_FOR_TRIALS, Sweep, overrides

POLL_SECONDS = 0.2
MOST_FAILURES = 3
"""Runs that may fail one after the other: then something is wrong that other values do not mend."""


class SweepFailed(Exception):
    """Runs fail one after the other; the message says why the last one did."""


class SweepStopped(Exception):
    """Says that a signal asks this worker to stop. The trial that it had will be tried again."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


@dataclass(kw_only=True)
class Watched:
    """Reads a metric from a run's file as its rows come.

    Attributes:
        rows: (step, value) of the rows so far, without those before the first step.
    """

    path: str
    metric: str
    rows: list[tuple[int, float]] = field(default_factory=list)
    _size: int = -1

    def new_rows(self) -> Iterator[tuple[int, float]]:
        """Yield the rows that have come since the last call."""
        size = os.path.getsize(self.path) if os.path.exists(self.path) else -1
        if size == self._size:
            return
        self._size = size
        rows = [row for line in complete_lines(self.path) if (row := read_row(line)) is not None]
        values = [(row["step"], row[self.metric]) for row in rows if row["step"] >= 0 and self.metric in row]
        seen = {step for step, _ in self.rows}  # a run that goes on from a checkpoint may write steps again
        for step, value in values:
            if step not in seen and value is not None:
                self.rows.append((step, value))
                yield step, value


class Worker:
    """Plays trials until there are enough."""

    def __init__(self, sweep: Sweep, trials: Trials, words: Sequence[str], tell: Callable[[str], None]) -> None:
        """
        Args:
            words: overrides of every run.
            tell: shows a line.
        """
        self._sweep, self._trials, self._words, self._tell = sweep, trials, list(words), tell
        self._noted: list[signal.Signals] = []
        self._failures = 0

    def play_all(self, most: int) -> None:
        """Play trials until there are `most`, with those of other workers.

        Raises:
            SweepFailed: several runs in a row have failed.
            SweepStopped: a signal came; the run under way has saved what it saves at a signal.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self._noted.append(signal.Signals(number))

        with signals_handled(STOP_SIGNALS, note):
            while True:
                with self._trials.next(most) as trial:
                    if trial is None:
                        return
                    self._play(trial)

    def _play(self, trial: Trial) -> None:
        folder, settings = self._trials.folder(trial), overrides(trial.params)
        self._tell(f"trial {trial.number} begins: {' '.join(settings)}")
        watched = Watched(path=os.path.join(folder, METRICS_FILE), metric=self._sweep.metric)
        code, pruned = self._train(trial, [*self._words, *settings], folder, watched)
        if self._noted:
            raise SweepStopped(self._noted[0])
        study, state = self._trials.study, TrialState.COMPLETE
        if pruned:
            state = TrialState.PRUNED
        elif code or not watched.rows:
            state = TrialState.FAIL
        value = watched.rows[-1][1] if state is TrialState.COMPLETE else None
        study.tell(trial, value, state=state)
        self._failures = self._failures + 1 if state is TrialState.FAIL else 0
        last = f"{self._sweep.metric} {watched.rows[-1][1]:.4g} at step {watched.rows[-1][0]}" if watched.rows else ""
        if state is not TrialState.FAIL:
            self._tell(f"trial {trial.number} {'is pruned' if pruned else 'ends'}: {last}")
            return
        why = _last_line(f"{folder}.log") if code else f"no row of {watched.path} has {self._sweep.metric}"
        self._tell(f"trial {trial.number} failed with exit code {code}: {why}")
        if self._failures == MOST_FAILURES:
            raise SweepFailed(f"{MOST_FAILURES} runs in a row have failed, the last one: {why}")

    def _train(self, trial: Trial, words: Sequence[str], folder: str, watched: Watched) -> tuple[int, bool]:
        """Train to the end, or until Optuna prunes the trial; returns the exit code, and whether it does."""
        command = [*module_command("megarl.cli.main"), "train", self._sweep.config, *words]
        place = overrides(dict(zip(SET_FOR_TRIALS, (folder, "auto"), strict=True)))
        with open(f"{folder}.log", "ab") as log:
            run = subprocess.Popen(
                [*command, *place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C reaches this process alone, which sends it on
                preexec_fn=die_with_parent,
            )
        sent, pruned = 0, False
        while run.poll() is None:
            while sent < len(self._noted):
                run.send_signal(self._noted[sent])
                sent += 1
            if self._reported(trial, watched) and not pruned and not sent:
                run.send_signal(signal.SIGTERM)
                pruned = True
            time.sleep(POLL_SECONDS)
        self._reported(trial, watched)
        return run.returncode, pruned

    def _reported(self, trial: Trial, watched: Watched) -> bool:
        """Tell Optuna of new rows; returns whether it prunes the trial."""
        prune = False
        for step, value in watched.new_rows():
            trial.report(value, step)
            prune = prune or trial.should_prune()
        return prune


def _last_line(log: str) -> str:
    """Return the last line that a run printed."""
    with open(log, encoding="utf-8", errors="replace") as f:
        lines = [line.strip() for line in f if line.strip()]
    return lines[-1].removeprefix("megarl: ").removeprefix("error: ")[:300] if lines else "it printed nothing"

"""Opens the Optuna study of a search, and hands out its trials to workers that may be killed at any time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from megarl.telemetry.lines import complete_lines
from megarl.tuning.sweep import Choices, Range, Sweep

JOURNAL = "journal.log"
"""Name of the study's file, which `optuna-dashboard` opens."""
Direction = Literal["maximize", "minimize"]
_LOCKS = "locks"
STUDY, _METRIC = "search", "metric"
"""Names of the study, and of its user attribute with the metric."""
_RUN, _INSTEAD_OF = "run", "instead of"
"""Names of a trial's user attributes: the number in the name of its run's folder; the number of the trial that lost
its worker and whose values and run this one has."""


class _WholeLines(JournalFileSymlinkLock):
    """Locks the study's file for a writer, which finds whole lines there: its own would join half of one.

    A worker leaves half a line if it is killed, or its disk is full. Readers pass over half a last line.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = path

    def acquire(self) -> bool:
        acquired = super().acquire()
        with open(self._path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 1))
            is_whole = f.read() in (b"", b"\n")
        if not is_whole:
            os.truncate(self._path, sum(map(len, complete_lines(self._path))))
        return acquired


class Trials:
    """Hands out the trials of a study. Workers on several machines may share its folder.

    A worker holds a lock while it has a trial. A trial that runs without a lock has lost its worker: it fails, and the
    next trial has its values and the folder of its run, which goes on from its checkpoint, if it left one.

    Attributes:
        study: of Optuna.
    """

    def __init__(self, sweep: Sweep) -> None:
        """
        Raises:
            ValueError: Optuna does not take the search's keys, or the folder's study, in one line.
            OSError: the study cannot be read or written.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep = sweep
        self._distributions = {key: _distribution(key, values) for key, values in sweep.keys.items()}
        sampler = _made(optuna.samplers, sweep.sampler, "sampler")
        pruner = _made(optuna.pruners, sweep.pruner, "pruner")
        try:
            os.makedirs(os.path.join(sweep.folder, _LOCKS), exist_ok=True)
        except OSError as e:
            raise ValueError(f"folder {sweep.folder} cannot be made: {e.strerror}; set another one") from e
        direction: Direction = "maximize" if sweep.mode == "max" else "minimize"
        with self._alone():
            self.study: Study = self._opened_study(direction, sampler=sampler, pruner=pruner)
            metric = self.study.user_attrs.get(_METRIC, sweep.metric)
            if metric != sweep.metric or self.study.direction is not StudyDirection[direction.upper()]:
                raise ValueError(f"{sweep.folder} holds a search with another metric or mode; set another folder")
            self._check_values()
            self.study.set_user_attr(_METRIC, sweep.metric)

    @contextmanager
    def next(self, most: int) -> Iterator[Trial | None]:
        """Take a trial, and hold it inside; None if there are `most`.

        A trial that has no result when this is left is tried again by the next worker.
        """
        with self._alone():
            self._fail_lost()
            trial = self.study.ask(self._distributions) if self._started() < most else None
            lock = self._lock(trial.number) if trial is not None else None
            assert trial is None or lock is not None, "nobody else has a new trial"
        try:
            yield trial
        finally:
            if lock is not None:
                os.close(lock)

    def folder(self, trial: Trial | FrozenTrial) -> str:
        """Return the folder of a trial's run."""
        return os.path.join(self._sweep.folder, f"trial_{trial.user_attrs.get(_RUN, trial.number):04d}")

    def finished(self) -> list[FrozenTrial]:
        """List the trials that have a result, the best first; pruned ones come last."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = [trial for trial in self.study.get_trials(deepcopy=False, states=states) if trial.value is not None]
        sign = -1 if self._sweep.mode == "max" else 1
        return sorted(trials, key=lambda trial: (trial.state is TrialState.PRUNED, sign * (trial.value or 0.0)))

    def all_have_failed(self) -> bool:
        """Say whether there are trials, all of which have failed."""
        return {trial.state for trial in self.study.get_trials(deepcopy=False)} == {TrialState.FAIL}

    def _opened_study(self, direction: Direction, **options: Any) -> Study:
        """Open the study, or make one. Raises ValueError for a journal that is damaged."""
        journal = os.path.join(self._sweep.folder, JOURNAL)
        try:
            storage = JournalStorage(JournalFileBackend(journal, lock_obj=_WholeLines(journal)))
            return optuna.create_study(
                storage=storage, study_name=STUDY, direction=direction, load_if_exists=True, **options
            )
        except OSError:
            raise
        except Exception as e:  # Optuna raises anything for lines that it did not write
            why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            raise ValueError(f"{journal} is damaged ({why}): mend it, or set another folder") from e

    def _check_values(self) -> None:
        """Raise ValueError if Optuna cannot compare the values of earlier trials with those of this search."""
        for trial in self.study.get_trials(deepcopy=False):
            for key in trial.distributions.keys() & self._distributions.keys():
                try:
                    check_distribution_compatibility(trial.distributions[key], self._distributions[key])
                except ValueError as e:
                    why = f"{self._sweep.folder} holds a search with other choices, or another kind of range, for {key}"
                    raise ValueError(f"{why}; set another folder") from e

    def _fail_lost(self) -> None:
        replaced = self._replaced()
        for lost in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if (lock := self._lock(lost.number)) is None:
                continue
            if lost.number not in replaced:  # else this worker's predecessor was killed right here
                run = lost.user_attrs.get(_RUN, lost.number)
                self.study.enqueue_trial(lost.params, user_attrs={_RUN: run, _INSTEAD_OF: lost.number})
            self.study.tell(lost.number, state=TrialState.FAIL)
            os.close(lock)

    def _started(self) -> int:
        """Count the trials that run or have ended, and whose place no other has."""
        replaced = self._replaced()
        trials = self.study.get_trials(deepcopy=False)
        return sum(trial.state is not TrialState.WAITING and trial.number not in replaced for trial in trials)

    def _replaced(self) -> set[int]:
        trials = self.study.get_trials(deepcopy=False)
        return {trial.user_attrs[_INSTEAD_OF] for trial in trials if _INSTEAD_OF in trial.user_attrs}

    def _lock(self, number: int) -> int | None:
        """Lock a trial; returns the descriptor that holds the lock, or None if another worker has it."""
        descriptor = self._opened(f"trial_{number:04d}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other workers out of the study inside."""
        descriptor = self._opened("workers.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _opened(self, name: str) -> int:
        path = os.path.join(self._sweep.folder, _LOCKS, name)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise ValueError(f"{path} cannot be opened: {e.strerror}; set another folder") from e


def _distribution(key: str, values: Any) -> BaseDistribution:
    try:
        if not isinstance(values, Range):
            return CategoricalDistribution(values)
        numbers = [number for number in (values.low, values.high, values.step) if number is not None]
        if all(isinstance(number, int) for number in numbers):
            return IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
        return FloatDistribution(values.low, values.high, log=values.log, step=values.step)
    except ValueError as e:
        raise ValueError(f"keys.{key}: {' '.join(str(e).split())}") from e


def _made(module: Any, choice: Choices, key: str) -> Any:
    kinds = [name for name in module.__all__ if name.endswith(key.capitalize()) and not name.startswith("Base")]
    if choice.name not in kinds:
        raise ValueError(f"{key}.name = {choice.name} is none of {', '.join(kinds)}")
    try:
        return getattr(module, choice.name)(**choice.args)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{key}.args of {choice.name}: {' '.join(str(e).split())}") from e

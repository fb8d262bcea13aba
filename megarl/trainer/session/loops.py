"""Goes through the loops of a flow: their steps, and between these validation, checkpoints, recovery, signals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from megarl.checkpoint.folder import LOOP, Position
from megarl.parallel.world import World
from megarl.phases import Phase
from megarl.roles.trained import TrainedModel
from megarl.rollout.speed import Speed
from megarl.telemetry.profiler import Profiler
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import title_of
from megarl.trainer.records.run_records import Metrics, RunRecords
from megarl.trainer.resuming.checkpointing import Checkpointing, Kept
from megarl.trainer.resuming.resume import Start, begin_in_folder
from megarl.trainer.session.nonfinite import NonFiniteUpdates
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunInterrupted, RunRefused, RunStopped

Validate = Callable[[], Metrics]
"""Metrics on held-out data; every rank calls it."""


class Loops:
    """Goes through the steps of one loop after another. Loops that the run's checkpoint has behind it are passed over.

    Attributes:
        position: of the last step that is done, or of the one under way.
        is_first_step: whether the step under way is the first of its loop in this process.
    """

    def __init__(
        self,
        inputs: Inputs,
        world: World,
        records: RunRecords,
        checkpoints: Checkpointing,
        profiler: Profiler,
        start: Start,
        stop: StopRequest,
        *,
        phase: Callable[[Phase], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            phase: see `Run.phase`.
        """
        self._inputs, self._config, self._world = inputs, inputs.config, world
        self._records, self._report, self._checkpoints = records, records.report, checkpoints
        self._profiler, self._start, self._stop, self._phase = profiler, start, stop, phase
        self.position, self.is_first_step = start.position, True
        self._names: list[str] = []  # begun or passed over
        self._current: str | None = None
        self._before = self._row = 0  # the metric files' numbers of the steps before and at the end of the loop
        self._last_whole: tuple[Position, Metrics, int, Kept] | None = None  # a step, its validation, updates so far
        self._validation: Metrics = {}  # after the step of `position`
        self._skipped = 0
        self._unrecorded: tuple[dict[str, float], Speed | None] | None = None  # of a step that is being validated
        self._announced = False

    def begin(self) -> None:
        """Take the run's folder: see `Run.begin`."""
        begin_in_folder(self._inputs, self._world, self._start)
        self._report.begin()
        self._checkpoints.best.mark()

    def steps(self, loop: str, total: int, before: int | None, validate: Validate | None) -> Iterator[int]:
        """Yield the numbers of the steps that are still to be done: see `Run.steps`."""
        self._check_name(loop)
        order = len(self._names)
        self._names.append(loop)
        try:
            self._current = loop
            yield from self._steps(loop, order, total, before, validate)
        finally:
            self._current = None
            gc.unfreeze()

    def _steps(self, loop: str, order: int, total: int, before: int | None, validate: Validate | None) -> Iterator[int]:
        validates_first = validate is not None and self._config.trainer.val_before_train
        if before is None:
            before = self._row + (1 if validates_first and order else 0)
        self._row = before + total
        if order < self._start.position.order:
            return
        is_first_loop, self._announced = not self._announced, True
        if is_first_loop:
            self._records.announce(self._trained, self._start.folder)
        done, self.is_first_step = self._enter(loop, order), True
        if is_first_loop:
            self._records.begin()
        if done >= total:
            return
        self._before = before
        if done == 0:
            self._leave_if_asked(order)
        if validate is not None and validates_first and not done:
            metrics = self._validate(validate)
            if problem := self._checkpoints.best.problem_with(metrics):
                raise RunRefused(problem)
            self._records.step(Position(order, 0, loop), self._before, metrics)
            self._records.say_validation(loop, metrics)
        nonfinite = NonFiniteUpdates(self._config.trainer.on_nonfinite, done)
        self._forget()
        if self._config.trainer.save_freq > 0:
            self._checkpoints.prepare()
        with self._report.progress(title_of(loop), total, done=done):
            while done < total:
                self._leave_if_asked(order)
                self._checkpoints.settle(wait=False)
                self._keep()
                self.position, self._validation = Position(order, done + 1, loop), {}
                with self._profiler.step(self.row):
                    yield self.position.step
                    self._keep()
                    self._end_step(total, validate)
                    done = self._after_updates(total, nonfinite)
            if self._stop.agreed(self._world) is not None:  # the next loop asks, too late to save this one
                self._save_if_new()

    @property
    def row(self) -> int:
        """Return the metric files' number of the step under way, or of the validation before the first."""
        step = self.position.step if self.position.loop == self._current else 0
        return self._before + step

    def finish(self) -> None:
        """Save the last step, unless it is saved: see `Run.finish`."""
        self._save_if_new()
        if self._config.trainer.save_freq and self._unsaved:
            raise RunStopped(
                f"all {self.position.step} steps are done, but not saved; make room and start again to repeat those "
                f"since {self._checkpoints.latest or 'the beginning'}"
            )

    def save_whole_steps(self) -> None:
        """Save the last whole step: see `Run.save_whole_steps`."""
        self._checkpoints.settle()
        if self._last_whole is None:
            return
        position, validation, updates, kept = self._last_whole
        if position.order == self.position.order and updates == self._updates():
            self.position, self._validation = position, validation
            if self._unrecorded is not None:  # its validation has failed
                self._records.step(position, self._before + position.step, *self._unrecorded)
                self._unrecorded = None
            self._save_if_new(kept)

    @property
    def _trained(self) -> list[TrainedModel]:
        return [model for model in self._checkpoints.models.values() if isinstance(model, TrainedModel)]

    def _enter(self, loop: str, order: int) -> int:
        """Begin a loop, or go on in the one of the checkpoint; returns how many of its steps are done."""
        start = self._start
        if start.folder is None or order > start.position.order:
            return 0
        if start.position.loop != loop:
            raise RunRefused(
                f"'{start.folder}' was written in the loop '{start.position.loop}', where this flow has '{loop}': go "
                f"on with the flow that it began with"
            )
        self._checkpoints.load(start.folder, start.state)
        self.begin()
        return start.position.step

    def _forget(self) -> None:
        """Drop the metrics and skipped updates of the step before, or of one that a flow left in its middle."""
        self._records.collect()
        for model in self._trained:
            model.skipped.clear()

    def _check_name(self, loop: str) -> None:
        if not LOOP.fullmatch(loop) or loop == "global":
            raise ValueError(f"'{loop}' is no name for a loop: use lower-case letters, digits and dashes, not 'global'")
        if loop in self._names:
            raise ValueError(f"two loops of this flow are called '{loop}': their checkpoints would have the same names")
        if self._current is not None:
            raise ValueError(f"the loop '{loop}' begins while '{self._current}' is not over")

    def _leave_if_asked(self, order: int) -> None:
        signal = self._stop.agreed(self._world)
        if signal is None:
            return
        self._checkpoints.settle()
        if self.position.order == order:
            self._save_if_new()
        elif self._config.trainer.save_freq and self._unsaved:
            return  # the loop before was not saved as it was, and what it trained may be other models now: a step first
        raise RunInterrupted(signal)

    @property
    def _unsaved(self) -> bool:
        """Tell whether steps are done that no checkpoint has."""
        return self.position.step > 0 and self._checkpoints.position != self.position

    def _keep(self) -> None:
        self._last_whole = self.position, self._validation, self._updates(), self._checkpoints.keep()

    def _updates(self) -> int:
        return sum(len(model.skipped) for model in self._trained)

    def _save_if_new(self, kept: Kept | None = None) -> None:
        self._checkpoints.settle()
        if self._config.trainer.save_freq and self._unsaved:
            self._save(kept)

    def _end_step(self, total: int, validate: Validate | None) -> None:
        if self.is_first_step:
            gc.collect()
            gc.freeze()  # half a million objects, most of them of modules, at which each collection would look again
        self.is_first_step = False
        metrics, speed = self._records.collect(), self._records.speed()
        self._skipped += sum(sum(model.skipped) for model in self._trained)
        if self._trained:
            metrics["perf/skipped_updates"] = float(self._skipped)
        self._unrecorded = metrics, speed
        if validate is not None and _due(self._config.trainer.test_freq, self.position.step, total, at_end=True):
            self._validation = self._validate(validate)
            metrics |= self._validation
            self._keep()
        self._unrecorded = None
        self._records.step(self.position, self.row, metrics, speed)

    def _after_updates(self, total: int, nonfinite: NonFiniteUpdates) -> int:
        """Recover from a step that went wrong, or save it where that is due; returns how many steps are done."""
        every, models = self._config.trainer.save_freq, self._checkpoints.models
        skipped = {name: list(model.skipped) for name, model in models.items() if isinstance(model, TrainedModel)}
        self._forget()
        if event := nonfinite.after_step(self.position.step, skipped):
            self._recover(event, nonfinite)
            return self.position.step
        best = self._checkpoints.best
        problem = best.problem_with(self._validation) if self._validation else None
        improved = best.improved_by(self._validation) or problem is not None
        if improved or _due(every, self.position.step, total, at_end=every > 0):  # -1: once, when the flow is over
            self._save(wait=problem is not None)
        if problem is not None:
            raise RunStopped(f"{problem}; {self._checkpoints.latest} holds the steps so far")
        return self.position.step

    def _validate(self, validate: Validate) -> dict[str, float]:
        with self._records.timers(Phase.VALIDATE, whole=True):  # what it generates is none of the step's generation
            return dict(validate())

    def _save(self, kept: Kept | None = None, *, wait: bool = True) -> None:
        """Save everything on which the next step depends."""
        with self._phase(Phase.SAVE):
            row = self._before + self.position.step
            self._checkpoints.save(self.position, row, self._validation, kept, wait=wait)

    def _recover(self, event: str, nonfinite: NonFiniteUpdates) -> None:
        """Go on from the last checkpoint, with the batches after the bad one, or stop."""
        self._checkpoints.settle()
        folder, saved = self._checkpoints.latest, self._checkpoints.position
        if self._config.trainer.on_nonfinite == "rollback" and saved is not None and saved.order == self.position.order:
            assert folder is not None
            if nonfinite.may_roll_back(saved.step):
                self._checkpoints.load(folder, None)
                self.position, self._validation = saved, {}
                self._records.rewind(self._before + saved.step + 1)
                self._report.warn(f"{event}; rolled back to {folder}, to go on with the next batches")
                return
            event += f"; rolled back to {folder} too often"
        holds = "trainer.save_freq=0, so nothing is saved"
        if self._config.trainer.save_freq:
            self._save()
            holds = f"the last checkpoint is {folder}" if self._unsaved else f"{self._checkpoints.latest} holds them"
        raise RunStopped(f"{event}; {holds}; look at this step's rollouts and rewards, and at the learning rate")


def _due(every: int, step: int, total: int, *, at_end: bool) -> bool:
    """Tell whether something with this frequency happens now; 0 is never, -1 only at the end."""
    return every != 0 and ((at_end and step == total) or (every > 0 and step % every == 0))

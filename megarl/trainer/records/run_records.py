"""Keeps the records of a run: its first lines, the rows of its steps, its timeline and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megarl.algorithms.loss import Metric
from megarl.checkpoint.folder import Position
from megarl.hybrid.generation import Generation
from megarl.own_code import OwnCodeError, in_a_line, name_of, torch_as_before
from megarl.parallel.world import World
from megarl.roles.trained import TrainedModel
from megarl.rollout.speed import Speed
from megarl.telemetry.timers import PhaseTimers, seconds_by_phase
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.memory_report import MemoryReport
from megarl.trainer.records.pace import Pace
from megarl.trainer.records.report import Report, title_of
from megarl.trainer.records.slow_node import SlowNode
from megarl.trainer.records.start_line import start_line
from megarl.trainer.records.step_metrics import StepMetrics
from megarl.trainer.records.timeline import Timeline
from megarl.trainer.stopped import RunStopped

Metrics = Mapping[str, float]
Callback = Callable[[str, int, Metrics], None]
"""(loop, step, the row of the metric files), after each step, on every rank."""


class RunRecords:
    """Tells of a run and of its steps; every rank calls its methods.

    Attributes:
        report: the console and the files of the run.
        pace: learns what the actor's model computes.
        memory: predicted and measured.
        generations: the run's engines.
    """

    def __init__(
        self, inputs: Inputs, world: World, report: Report, timers: PhaseTimers, callbacks: Sequence[Callback] = ()
    ) -> None:
        config = inputs.config
        self.report, self._inputs, self._world, self.timers = report, inputs, world, timers
        self.memory = MemoryReport(config, inputs.arch, world, report)
        self.pace = Pace(inputs.arch, world, config.actor_rollout_ref.model.dtype)
        self._slow_node = SlowNode(world.ranks_per_node)
        self.generations: list[Generation] = []
        self._timeline = Timeline(config.trainer, world, report.warn)
        self._metrics, self._callbacks = StepMetrics(), tuple(callbacks)

    def add_engine(self, generation: Generation) -> None:
        """Record the speed of this engine from now on."""
        self.generations.append(generation)

    def announce(self, trained: Sequence[TrainedModel], checkpoint: str | None) -> None:
        """Show the first lines of the run, when everything is built that its first loop needs.

        Args:
            checkpoint: the folder that the run goes on from, if any.
        """
        self.report.say(start_line(self._inputs, self._world, trained, self.generations))
        for remark in self._inputs.remarks:
            self.report.say(remark)
        if checkpoint:
            self.report.say(f"resuming from {checkpoint}")

    def begin(self) -> None:
        """Predict the memory, and begin the timeline: the first step comes next."""
        self.memory.predict()
        self._timeline.begin()

    def log(self, prefix: str, metrics: Mapping[str, Metric | float]) -> None:
        """Add metrics of the step under way."""
        self._metrics.add(prefix, metrics)

    def collect(self) -> dict[str, float]:
        """Return the metrics that were logged since the last call."""
        return self._metrics.collect()

    def speed(self) -> Speed | None:
        """Return the speed of generation since the last call; None if nothing was generated."""
        return next((speed for engine in self.generations if (speed := engine.speed.collect()).seconds), None)

    def step(self, position: Position, row: int, metrics: Metrics, speed: Speed | None = None) -> None:
        """Write the row of a step, or of the validation before the first one.

        Args:
            row: its number in the metric files.

        Raises:
            RunStopped: on every rank, if the run's folder is gone or belongs to another run.
            OwnCodeError: on every rank, if a callback failed; the row is written.
        """
        loop, step = position.loop, position.step
        number = {f"{loop}/step": float(step)} if loop != "rl" else {}
        spans, waits = self.timers.spans(), self._world.watch.collect_waits()
        seconds = seconds_by_phase(spans)
        paces, timelines, peaks, problems = zip(
            *self._world.all_gather(
                (
                    self.pace.own(seconds, waits, speed),
                    self._timeline.own(spans, waits),
                    self.timers.collect_peaks(),
                    self.report.folder_problem(),
                ),
                "the seconds of a step",
            ),
            strict=True,
        )
        if problems[0] is not None:
            raise RunStopped(f"step {step} is not recorded: {problems[0]}")
        self._timeline.step(row, loop, timelines)
        pace, sequences = self.pace.collect(paces, seconds, speed)
        nodes, slow = self._slow_node.after_step([rank.work for rank in paces], [rank.host for rank in paces])
        if slow:
            self.report.warn(slow)
        memory = self.memory.measured(peaks)
        self.speed()  # of a validation: it is of no step
        whole = self.report.step(row, {**number, **metrics, **memory, **pace, **nodes}, seconds, sequences)
        self._call_back(loop, step, whole)

    def _call_back(self, loop: str, step: int, row: Metrics) -> None:
        """Call the callbacks; raises OwnCodeError on every rank if one of them fails on any."""
        problem, failure = "", None
        for callback in self._callbacks:
            try:
                with torch_as_before():
                    callback(loop, step, {**row})
            except (Exception, SystemExit) as e:  # a user's function fails as it likes
                problem, failure = f"the callback {name_of(callback)} failed at step {step}: {in_a_line(e)}", e
                break
        problems = self._world.all_gather(problem, "the callbacks")
        if any(problems):
            raise OwnCodeError(next(filter(None, problems)), everywhere=True) from failure

    def say_validation(self, loop: str, metrics: Metrics) -> None:
        """Show the accuracy, or the loss, on held-out data before the first step of a loop."""
        if "val/accuracy" in metrics:
            accuracy = f"{metrics['val/accuracy']:.1%}"
            self.report.say(f"held-out accuracy before the first {title_of(loop)} step: {accuracy}")
        elif "val/loss" in metrics:
            self.report.say(f"held-out loss before the first {title_of(loop)} step: {metrics['val/loss']:.4f}")

    def rewind(self, row: int) -> None:
        """Drop what is recorded of the row and of later ones: the run goes back."""
        self.report.rewind(row)
        self._timeline.rewind()

    def close(self) -> None:
        """Close the files of the run. Safe after other ranks died."""
        self.pace.close()
        self.report.close()
        self._timeline.close()

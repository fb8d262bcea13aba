"""A run: it saves, resumes, validates, reports, stops and recovers, whatever the flow trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

from megarl.algorithms.loss import Metric
from megarl.checkpoint.folder import LOOP, Position
from megarl.checkpoint.store import Saved
from megarl.config.policy import Megatron
from megarl.flow_kinds import trains
from megarl.hybrid.generation import Generation
from megarl.hybrid.residency import Residency
from megarl.parallel.generation_groups import GenerationGroups, generation_groups
from megarl.parallel.train_groups import TrainGroups, train_groups
from megarl.parallel.world import World
from megarl.phases import Phase
from megarl.rewards.parts import functions_of
from megarl.roles.frozen import FrozenModel
from megarl.roles.model import MegatronModel
from megarl.roles.trained import TrainedModel
from megarl.rollout.replicas import OnFinished
from megarl.rollout.speed import Speed
from megarl.telemetry.profiler import Profiler
from megarl.telemetry.timers import PhaseTimers, seconds_by_phase
from megarl.trainer.agreement import check_same_values
from megarl.trainer.experience.episodes import build_episodes
from megarl.trainer.experience.scoring import Scorer
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout, train_layout
from megarl.trainer.nonfinite import NonFiniteUpdates
from megarl.trainer.records.memory_report import MemoryReport
from megarl.trainer.records.pace import Pace
from megarl.trainer.records.report import Report, title_of
from megarl.trainer.records.start_line import start_line
from megarl.trainer.records.step_metrics import StepMetrics
from megarl.trainer.records.timeline import Timeline
from megarl.trainer.resuming.checkpointing import Checkpointing, Kept
from megarl.trainer.resuming.resume import Start, begin_in_folder
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunInterrupted, RunRefused, RunStopped
from megarl.types import Batch, Rollouts

T = TypeVar("T")

Metrics = Mapping[str, float]
Callback = Callable[[str, int, Metrics], None]
"""(loop, step, the row of the metric files), after each step, on every rank."""


class Run:
    """Owns the configuration, the ranks' groups, the records, the memory, and what is saved.

    A flow (`megarl.flows`) builds roles, lets them join with `add`, and goes through `steps`. On every rank the same
    calls come in the same order. When a run resumes, the flow is executed from its beginning: loops that were done are
    passed over, and in the loop of the checkpoint everything that has joined gets its state. So what trains a role
    stands within `steps`; what stands between them is done again.

    Attributes:
        inputs: what the run reads: data, tokenizer, reward.
        position: of the last step that is done, or of the one under way.
        generations: the engines that were built.
        pace: is told what the actor's model computes.
        is_first_step: whether the step under way is the first of its loop in this process.
        resumes: whether the run goes on from a checkpoint, so that first weights need not be read.
    """

    def __init__(
        self,
        inputs: Inputs,
        world: World,
        report: Report,
        stop: StopRequest,
        start: Start,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.inputs, self.config, self.world, self.report = inputs, inputs.config, world, report
        self.groups = self.groups_of(self.config.actor_rollout_ref.actor.megatron)
        self.profiler = Profiler(
            self.config.profiler, self.config.trainer.run_dir, rank=world.rank, device=world.device, warn=report.warn
        )
        self.timers, self.residency = PhaseTimers(world.device, self.profiler.phase), Residency()
        self.memory = MemoryReport(self.config, inputs.arch, world, report)
        self.pace = Pace(inputs.arch, world, self.config.actor_rollout_ref.model.dtype)
        self._timeline = Timeline(self.config.trainer, world, report.warn)
        self.checkpoints = Checkpointing(inputs, world, start, report)
        self.position, self.resumes = start.position, start.folder is not None
        self._stop, self._start, self._callbacks = stop, start, tuple(callbacks)
        self._metrics, self._skipped = StepMetrics(), 0
        self._loops: list[str] = []  # begun or passed over
        self._open: str | None = None
        self._before = self._row = 0  # the metric files' numbers of the steps before and at the end of the loop
        self._roles: dict[str, MegatronModel] = {}
        self._whole: tuple[Position, Metrics, int, Kept] | None = None  # the last step, and updates
        self._validated: Metrics = {}  # what the validation after the step of `position` gave
        self.is_first_step = True
        self._announced = False
        self.generations: list[Generation] = []
        if trains(self.config):  # else a signal ends the process: there is no step to wait for
            stop.defer(self.config.trainer.stop_timeout, saves=self.config.trainer.save_freq != 0)
        # before any model is built: importing what scores takes seconds meanwhile
        self._scorer = Scorer(inputs, world, report.say) if functions_of(inputs.rewards) else None

    def begin(self) -> None:
        """Take the run's folder; every rank calls it, once nothing can refuse the run any more: a fresh one at once,
        one that goes on when it has loaded its checkpoint.

        Raises:
            RunRefused: on every rank, if the folder cannot be written, or a rank does not see it.
        """
        begin_in_folder(self.inputs, self.world, self._start)
        self.report.begin()
        self.checkpoints.best.mark()

    def add(self, name: str, joining: T) -> T:
        """A role, or something small with `state()` and `load_state()`, joins the run under a name: from now on it is
        in the checkpoints, and a role's memory goes and comes with the phases. A frozen model is in none: it comes from
        its files. Returns what joined."""
        if isinstance(joining, MegatronModel):
            if not isinstance(joining, FrozenModel):
                self.checkpoints.add_model(name, joining)
            self._roles[name] = joining
            self.residency.add(joining.kind, joining.memory)
        else:
            self.checkpoints.add_state(name, joining)  # type: ignore[arg-type]
        return joining

    def restores(self, name: str) -> bool:
        """Whether a model of that name is in the checkpoint that the run goes on from: its first weights need not be
        read then."""
        return self._start.folder is not None and name in self._start.state["models"]

    def generation(self, actor: MegatronModel) -> Generation:
        """The engine that the configuration names, around an actor that has joined."""
        if actor not in self._roles.values():
            raise ValueError("an actor joins the run, with run.add, before an engine is built around it")
        ours, groups = self.config.actor_rollout_ref, self._generation_groups
        self.generations.append(
            Generation(
                actor,
                groups,
                rollout=ours.rollout,
                reshard=ours.reshard,
                model_path=ours.model.path,
                residency=self.residency,
                timers=self.timers,
                max_model_len=self.inputs.max_sequence_length,
                decode=self.inputs.tokenizer.decode,
                episodes=build_episodes(self.inputs, groups),
            )
        )
        return self.generations[-1]

    def groups_of(self, megatron: Megatron) -> TrainGroups:
        """The groups of a model with its own Megatron keys; those of models with the same layout are the same."""
        return train_groups(self.world, train_layout(self.config, megatron), self.config.data.seed)

    @cached_property
    def _generation_groups(self) -> GenerationGroups:
        return generation_groups(self.world, generation_layout(self.config))

    @contextmanager
    def phase(self, phase: Phase | str) -> Iterator[None]:
        """A part of a step: it is timed, and what it has no use for leaves the GPU.

        Args:
            phase: one of the program's, or a name of the flow's own.
        """
        with self.timers(phase):
            self.residency.enter(phase)
            yield

    def log(self, prefix: str, metrics: Mapping[str, Metric | float]) -> None:
        """Metrics of the step under way, as `{prefix}/{name}`; of one that is logged several times, what its `reduce`
        says, or the mean of numbers."""
        self._metrics.add(prefix, metrics)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The same rollouts with `rewards`, by the run's reward function; every rank calls it.

        Raises:
            RewardError: a response could not be scored, with `reward.on_error=fail`, or none at all could.
            ValueError: the run has no reward function.
        """
        if self._scorer is None:
            raise ValueError("this run has no reward function: set reward.name or reward.parts, or score otherwise")
        return self._scorer(rollouts)

    @property
    def on_finished(self) -> OnFinished | None:
        """Has a response scored while others are being generated, for `Generation.rollouts`; None: nothing does.

        Episodes are scored when they are over, where nobody has scored them yet: see `score_episodes`.
        """
        if self._scorer is None or self.config.environment.answers:
            return None
        return self._scorer.submit

    def score_metrics(self) -> dict[str, float]:
        """Of the calls of reward functions since the last time: seconds and further tries; else nothing."""
        return self._scorer.metrics() if self._scorer is not None else {}

    def steps(
        self, loop: str, total: int, *, before: int | None = None, validate: Callable[[], Metrics] | None = None
    ) -> Iterator[int]:
        """The numbers of a loop's steps that are still to be done, from 1 to `total`.

        Args:
            loop: its name: lower-case letters, digits and dashes. Checkpoints of "rl" are called `global_step_N`, those
                of another loop `{loop}_step_N`.
            before: the metric files' number of the step before the first, which is that of a validation before it.
                Default: no number occurs twice.
            validate: metrics on held-out data, asked as `trainer.test_freq` and `trainer.val_before_train` say.

        A loop that the flow leaves with `break` has no row for that step.

        Raises:
            ValueError: the name is none, or was given to another loop, or the loop before is not over.
            RunStopped: on every rank, if something is wrong that more steps would not mend.
            RunInterrupted: on every rank, after a signal; a checkpoint is written.
        """
        self._check_name(loop)
        order = len(self._loops)
        self._loops.append(loop)
        try:
            self._open = loop
            yield from self._steps(loop, order, total, before, validate)
        finally:
            self._open = None

    def _steps(
        self, loop: str, order: int, total: int, before: int | None, validate: Callable[[], Metrics] | None
    ) -> Iterator[int]:
        validates_first = validate is not None and self.config.trainer.val_before_train
        if before is None:
            before = self._row + (1 if validates_first and order else 0)
        self._row = before + total
        if order < self._start.position.order:
            return
        is_first_loop, self._announced = not self._announced, True
        if is_first_loop:
            self._announce()
        done, self.is_first_step = self._enter(loop, order), True
        if is_first_loop:
            self.memory.predict()
            self._timeline.begin()
        if done >= total:
            return
        self._before = before
        if done == 0:
            self._leave_if_asked(order)
        shown = title_of(loop)
        if validate is not None and validates_first and not done:
            metrics = self._validate(validate)
            if problem := self.checkpoints.best.problem_with(metrics):
                raise RunRefused(problem)
            self._report_step(Position(order, 0, loop), metrics)
            if "val/accuracy" in metrics:
                self.report.say(f"held-out accuracy before the first {shown} step: {metrics['val/accuracy']:.1%}")
            elif "val/loss" in metrics:
                self.report.say(f"held-out loss before the first {shown} step: {metrics['val/loss']:.4f}")
        nonfinite = NonFiniteUpdates(self.config.trainer.on_nonfinite, done)
        self._forget()
        with self.report.progress(shown, total, done=done):
            while done < total:
                self._leave_if_asked(order)
                self._keep()
                self.position, self._validated = Position(order, done + 1, loop), {}
                with self.profiler.step(self.row):
                    yield self.position.step
                    self._keep()
                    self._end_step(total, validate)
                    done = self._after_updates(total, nonfinite)
            if self._stop.agreed(self.world) is not None:  # the next loop asks, too late to save this one
                self._save_if_new()

    @property
    def row(self) -> int:
        """The metric files' number of the step under way, or of the validation before the first."""
        step = self.position.step if self.position.loop == self._open else 0
        return self._before + step

    @property
    def checks_agreement(self) -> bool:
        """Whether ranks and engine are compared in the step under way: `trainer.agreement_freq`."""
        every = self.config.trainer.agreement_freq
        return every > 0 and (self.is_first_step or self.position.step % every == 0)

    def check_agreement(self, batch: Batch) -> None:
        """Stop if a rank computed another batch than the others, in the steps where that is checked."""
        if self.checks_agreement:
            check_same_values(batch, self.world, self.position.step)

    def finish(self) -> None:
        """After the flow's last step.

        Raises:
            RunStopped: what the run trained cannot be saved; work would be lost with exit code 0.
        """
        if self.config.trainer.save_freq and self._unsaved and not self._save():
            raise RunStopped(
                f"all {self.position.step} steps are done, but not saved; make room and start again to repeat those "
                f"since {self.checkpoints.latest or 'the beginning'}"
            )

    def save_whole_steps(self) -> None:
        """Save the last step that is whole, where a step cannot go on: the one before, unless the models have changed
        since; every rank calls it."""
        if self._whole is None:
            return
        position, validated, updates, kept = self._whole
        if position.order == self.position.order and updates == self._updates():
            self.position, self._validated = position, validated
            self._save_if_new(kept)

    def close(self, *, engines: bool = True) -> None:
        """What tells of the run, scores and plays episodes, which needs no other rank, whatever became of them.

        Args:
            engines: the engines, too: on all ranks, while the world still stands.
        """
        if self._scorer is not None:
            self._scorer.close()
        self.pace.close()
        self.report.close()
        self._timeline.close()
        for generation in self.generations:
            generation.close(engine=engines)

    @property
    def models(self) -> Mapping[str, MegatronModel]:
        """The roles that have joined, by name."""
        return self.checkpoints.models

    @property
    def _trained(self) -> list[TrainedModel]:
        return [model for model in self.models.values() if isinstance(model, TrainedModel)]

    def _announce(self) -> None:
        self.report.say(start_line(self.inputs, self.world, self._trained, self.generations))
        for remark in self.inputs.remarks:
            self.report.say(remark)
        if self._start.folder:
            self.report.say(f"resuming from {self._start.folder}")

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
        self.checkpoints.load(start.folder, start.state)
        self.begin()
        return start.position.step

    def _forget(self) -> None:
        """What is left of a step: of the one before, or of one that a flow left in its middle."""
        self._metrics.collect()
        for model in self._trained:
            model.skipped.clear()

    def _check_name(self, loop: str) -> None:
        if not LOOP.fullmatch(loop) or loop == "global":
            raise ValueError(f"'{loop}' is no name for a loop: use lower-case letters, digits and dashes, not 'global'")
        if loop in self._loops:
            raise ValueError(f"two loops of this flow are called '{loop}': their checkpoints would have the same names")
        if self._open is not None:
            raise ValueError(f"the loop '{loop}' begins while '{self._open}' is not over")

    def _leave_if_asked(self, order: int) -> None:
        asked = self._stop.agreed(self.world)
        if asked is None:
            return
        if self.position.order == order:
            self._save_if_new()
        elif self.config.trainer.save_freq and self._unsaved:
            return  # the loop before was not saved as it was, and what it trained may be other models now: a step first
        raise RunInterrupted(asked)

    @property
    def _unsaved(self) -> bool:
        """Whether steps are done that no checkpoint has."""
        return self.position.step > 0 and self.checkpoints.position != self.position

    def _keep(self) -> None:
        self._whole = self.position, self._validated, self._updates(), self.checkpoints.keep()

    def _updates(self) -> int:
        return sum(len(model.skipped) for model in self._trained)

    def _save_if_new(self, kept: Kept | None = None) -> None:
        if self.config.trainer.save_freq and self._unsaved:
            self._save(kept)

    def _end_step(self, total: int, validate: Callable[[], Metrics] | None) -> None:
        self.is_first_step = False
        metrics, speed = self._metrics.collect(), self._speed()
        if validate is not None and _due(self.config.trainer.test_freq, self.position.step, total, at_end=True):
            self._validated = self._validate(validate)
            metrics |= self._validated
        self._skipped += sum(sum(model.skipped) for model in self._trained)
        if self._trained:
            metrics["perf/skipped_updates"] = float(self._skipped)
        self._report_step(self.position, metrics, speed)

    def _after_updates(self, total: int, nonfinite: NonFiniteUpdates) -> int:
        """Recover from a step that went wrong, or save it where that is due; returns how many steps are done."""
        every = self.config.trainer.save_freq
        skipped = {name: list(model.skipped) for name, model in self.models.items() if isinstance(model, TrainedModel)}
        self._forget()
        if what := nonfinite.after_step(self.position.step, skipped):
            self._recover(what, nonfinite)
            return self.position.step
        problem = self.checkpoints.best.problem_with(self._validated) if self._validated else None
        best = self.checkpoints.best.improved_by(self._validated) or problem is not None
        if best or _due(every, self.position.step, total, at_end=every > 0):  # -1: once, when the flow is over
            self._save()
        if problem is not None:
            raise RunStopped(f"{problem}; {self.checkpoints.latest} holds the steps so far")
        return self.position.step

    def _speed(self) -> Speed | None:
        """Of generation since the last time; None where nothing was generated."""
        return next((speed for one in self.generations if (speed := one.speed.collect()).seconds), None)

    def _report_step(self, position: Position, metrics: Metrics, speed: Speed | None = None) -> None:
        loop, step = position.loop, position.step
        named = {f"{loop}/step": float(step)} if loop != "rl" else {}
        spans, waits = self.timers.spans(), self.world.watch.collect_waits()
        seconds = seconds_by_phase(spans)
        told = self.pace.own(seconds, waits, speed), self._timeline.own(spans, waits), self.timers.collect_peaks()
        told_and_problem = *told, self.report.folder_problem()
        everyone = self.world.all_gather(told_and_problem, "the seconds of a step")
        paces, timelines, peaks, problems = zip(*everyone, strict=True)
        if problems[0] is not None:
            raise RunStopped(f"step {step} is not recorded: {problems[0]}")
        self._timeline.step(self._before + step, loop, timelines)
        pace, sequences = self.pace.collect(paces, seconds, speed)
        memory = self.memory.measured(peaks)
        self._speed()  # of a validation: it is of no step
        row = self.report.step(self._before + step, {**named, **metrics, **memory, **pace}, seconds, sequences)
        for callback in self._callbacks:
            callback(loop, step, row)

    def _validate(self, validate: Callable[[], Metrics]) -> dict[str, float]:
        with self.timers(Phase.VALIDATE):
            return dict(validate())

    def _save(self, kept: Kept | None = None) -> Saved | None:
        """Save everything on which the next step depends; None if it could not be written."""
        with self.phase(Phase.SAVE):
            return self.checkpoints.save(self.position, self._before + self.position.step, self._validated, kept)

    def _recover(self, what: str, nonfinite: NonFiniteUpdates) -> None:
        """Go on from the last checkpoint, with the batches after the bad one, or stop."""
        folder, saved = self.checkpoints.latest, self.checkpoints.position
        if self.config.trainer.on_nonfinite == "rollback" and saved is not None and saved.order == self.position.order:
            assert folder is not None
            if nonfinite.may_roll_back(saved.step):
                self.checkpoints.load(folder, None)
                self.position, self._validated = saved, {}
                self.report.rewind(self._before + saved.step + 1)
                self._timeline.rewind()
                self.report.warn(f"{what}; rolled back to {folder}, to go on with the next batches")
                return
            what += f"; rolled back to {folder} too often"
        holds = "trainer.save_freq=0, so nothing is saved"
        if self.config.trainer.save_freq:
            holds = f"{self.checkpoints.latest} holds them" if self._save() else f"the last checkpoint is {folder}"
        raise RunStopped(f"{what}; {holds}; look at this step's rollouts and rewards, and at the learning rate")


def _due(every: int, step: int, total: int, *, at_end: bool) -> bool:
    """Whether something with this frequency happens now; 0 is never, -1 only at the end."""
    return every != 0 and ((at_end and step == total) or (every > 0 and step % every == 0))

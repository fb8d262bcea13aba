"""Runs a flow, whatever it trains: roles join the run, which makes steps, saves, resumes, validates and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import torch

from megarl.algorithms.loss import Metric
from megarl.checkpoint.folder import Position
from megarl.config.policy import MegatronConfig
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
from megarl.rollout.replicas import OnFinished
from megarl.telemetry.profiler import Profiler
from megarl.telemetry.samples import chosen
from megarl.telemetry.timers import PhaseTimers
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout, train_layout
from megarl.trainer.records.report import Report
from megarl.trainer.records.run_records import Callback, RunRecords
from megarl.trainer.records.shown_rollouts import COLUMNS
from megarl.trainer.resuming.checkpointing import Checkpointing
from megarl.trainer.resuming.resume import Start
from megarl.trainer.scoring.episodes import build_episodes
from megarl.trainer.scoring.scorer import Scorer
from megarl.trainer.session.agreement import check_same_values
from megarl.trainer.session.loops import Loops, Validate
from megarl.trainer.stop import StopRequest
from megarl.types import Batch, Rollout, Rollouts, Tokens
from megarl.types.owners import Owners

T = TypeVar("T")


class Run:
    """Owns the configuration, the ranks' groups, the records, the memory, and what is saved.

    A flow (`megarl.flows`) builds roles, lets them join with `add`, and goes through `steps`. On every rank the same
    calls come in the same order. When a run resumes, the flow is executed from its beginning: loops that were done are
    passed over, and in the loop of the checkpoint everything that has joined gets its state. So the code that trains a
    role stands within `steps`; code between two loops is executed again.

    Attributes:
        config: the run's configuration.
        inputs: what the run reads: data, tokenizer, reward.
        world: all ranks of the run.
        groups: the process groups of the actor's layout.
        records: what is told of the run and of its steps, with its engines.
        report: prints lines, and writes metrics and samples.
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
        self.records = RunRecords(inputs, world, report, self.timers, callbacks)
        self.checkpoints = Checkpointing(inputs, world, start, report)
        self._loops = Loops(inputs, world, self.records, self.checkpoints, self.profiler, start, stop, phase=self.phase)
        self._start, self.resumes = start, start.folder is not None
        self._roles: dict[str, MegatronModel] = {}
        if trains(self.config):  # else a signal ends the process: there is no step to wait for
            stop.defer(self.config.trainer.stop_timeout, saves=self.config.trainer.save_freq != 0)
        # before any model is built: the scorer's processes import libraries meanwhile, which takes seconds
        self._scorer = Scorer(inputs, world, report.say) if functions_of(inputs.rewards) else None

    def begin(self) -> None:
        """Take the run's folder; every rank calls it, once nothing can refuse the run any more: a fresh run at once,
        one that goes on when it has loaded its checkpoint.

        Raises:
            RunRefused: on every rank, if the folder cannot be written, or a rank does not see it.
        """
        self._loops.begin()

    def add(self, name: str, joining: T) -> T:
        """Let a role, or something small with `state()` and `load_state()`, join the run under a name; returns it.

        From now on it is in the checkpoints, and a role's memory goes and comes with the phases. A frozen model is in
        no checkpoint: it comes from its files.
        """
        if isinstance(joining, MegatronModel):
            if not isinstance(joining, FrozenModel):
                self.checkpoints.add_model(name, joining)
            self._roles[name] = joining
            self.residency.add(joining.kind, joining.memory)
        else:
            self.checkpoints.add_state(name, joining)  # type: ignore[arg-type]
        return joining

    def restores(self, name: str) -> bool:
        """Tell whether a model of that name is in the checkpoint that the run goes on from: its first weights need not
        be read then."""
        return self._start.folder is not None and name in self._start.state["models"]

    def generation(self, actor: MegatronModel) -> Generation:
        """Build the engine that the configuration names, around an actor that has joined."""
        if actor not in self._roles.values():
            raise ValueError("an actor joins the run, with run.add, before an engine is built around it")
        roles, groups, curriculum = self.config.actor_rollout_ref, self._generation_groups, self.config.data.curriculum
        generation = Generation(
            actor,
            groups,
            rollout=roles.rollout,
            reshard=roles.reshard,
            model_path=roles.model.folder,
            residency=self.residency,
            timers=self.timers,
            max_model_len=self.inputs.max_sequence_length,
            decode=self.inputs.tokenizer.decode,
            episodes=build_episodes(self.inputs, groups),
            drawn_by=f"data.curriculum = {curriculum}" if ":" in curriculum else "what draws the prompts",
        )
        self.records.add_engine(generation)
        return generation

    def groups_of(self, megatron: MegatronConfig) -> TrainGroups:
        """Return the groups of a model with its own Megatron keys; models of one layout share them."""
        return train_groups(self.world, train_layout(self.config, megatron), self.config.data.seed)

    @cached_property
    def _generation_groups(self) -> GenerationGroups:
        return generation_groups(self.world, generation_layout(self.config))

    @contextmanager
    def phase(self, phase: Phase | str) -> Iterator[None]:
        """Time a part of a step, and take off the GPU what this part has no use for.

        Args:
            phase: one of the program's, or a name of the flow's own.
        """
        with self.timers(phase):
            self.residency.enter(phase)
            yield

    def log(self, prefix: str, metrics: Mapping[str, Metric | float]) -> None:
        """Log metrics of the step under way, as `{prefix}/{name}`.

        A metric that is logged several times in a step becomes what its `reduce` says; of numbers, the mean.
        """
        self.records.log(prefix, metrics)

    def show(self, rollouts: Rollouts) -> None:
        """Write some of the step's rollouts as text into the run's folder, where the report shows them; every rank
        calls it."""
        self.report.samples(self.row, self._with_tokens_of_shown(rollouts))

    def _with_tokens_of_shown(self, rollouts: Rollouts) -> Rollouts:
        """Bring the tokens of the rollouts that are shown to the first rank, which shows them."""
        if rollouts.holders is None:
            return rollouts
        places = chosen(rollouts.groups, self.config.trainer.log_rollouts) if self.config.trainer.log_rollouts else []
        here = {i: r for i in places if isinstance((r := rollouts[i]).response, Tokens)}
        brought: dict[int, Rollout] = {}
        for of_rank in self.world.gather(here if rollouts.holders.gives else {}, "rollouts to show"):
            brought |= of_rank
        return rollouts.of(brought.get(i, rollout) for i, rollout in enumerate(rollouts))

    def trained_on(self, batch: Batch) -> None:
        """Write log-probabilities and advantages of the batch beside the rollouts that `show` wrote in this step.

        Args:
            batch: made of those rollouts.
        """
        if batch.owners is not None:
            places = self.world.broadcast(self.report.shown, "which rollouts are shown")
            if not places:
                return
            block_of = torch.full((len(batch),), -1).index_fill_(0, torch.tensor(places), 0)
            batch = batch.held_by(Owners(block_of=block_of, blocks=((0,),), ranks=self.world), COLUMNS)
        self.report.trained_on(batch)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Return the same rollouts with `rewards`, by the run's reward function; every rank calls it.

        Raises:
            RewardError: a response could not be scored, with `reward.on_error=fail`, or none at all could.
            ValueError: the run has no reward function.
        """
        if self._scorer is None:
            raise ValueError("this run has no reward function: set reward.name or reward.parts, or score otherwise")
        return self._scorer(rollouts)

    @property
    def on_finished(self) -> OnFinished | None:
        """Return what scores a response while others are generated, for `Generation.rollouts`; None: nothing does.

        Episodes are scored when they are over: see `score_episodes`.
        """
        if self._scorer is None or self.config.environment.answers:
            return None
        return self._scorer.submit

    def score_metrics(self) -> dict[str, float]:
        """Return seconds and retries of the reward functions' calls since the last time; nothing without functions."""
        return self._scorer.metrics() if self._scorer is not None else {}

    def steps(
        self, loop: str, total: int, *, before: int | None = None, validate: Validate | None = None
    ) -> Iterator[int]:
        """Yield the numbers of a loop's steps that are still to be done, from 1 to `total`.

        Args:
            loop: its name: lower-case letters, digits and dashes. Checkpoints of "rl" are called `global_step_N`, those
                of another loop `{loop}_step_N`.
            before: the metric files' number of the step before the first, which is that of a validation before it.
                Default: no number occurs twice.
            validate: metrics on held-out data, called as `trainer.test_freq` and `trainer.val_before_train` say.

        A loop that the flow leaves with `break` has no row for that step.

        Raises:
            ValueError: the name is none, or was given to another loop, or the loop before is not over.
            RunStopped: on every rank, if something is wrong that more steps would not mend.
            RunInterrupted: on every rank, after a signal; a checkpoint is written.
        """
        return self._loops.steps(loop, total, before, validate)

    @property
    def position(self) -> Position:
        """Return the position of the last step that is done, or of the one under way."""
        return self._loops.position

    @property
    def is_first_step(self) -> bool:
        """Tell whether the step under way is the first of its loop in this process."""
        return self._loops.is_first_step

    @property
    def row(self) -> int:
        """Return the metric files' number of the step under way, or of the validation before the first."""
        return self._loops.row

    @property
    def checks_agreement(self) -> bool:
        """Tell whether ranks and engine are compared in the step under way: `trainer.agreement_freq`."""
        every = self.config.trainer.agreement_freq
        return every > 0 and (self.is_first_step or self.position.step % every == 0)

    def check_agreement(self, batch: Batch) -> None:
        """Stop if a rank computed another batch than the others, in the steps where that is checked."""
        if self.checks_agreement:
            check_same_values(batch, self.world, self.position.step)

    def finish(self) -> None:
        """Save the last step after the flow's end, unless it is saved.

        Raises:
            RunStopped: it cannot be saved; work would be lost with exit code 0.
        """
        self._loops.finish()

    def save_whole_steps(self) -> None:
        """Save the last step that is whole, where a step cannot go on: the one before, unless the models have changed
        since; every rank calls it."""
        self._loops.save_whole_steps()

    def close(self, *, engines: bool = True) -> None:
        """Close records, scorer and episodes. Safe after other ranks died.

        Args:
            engines: close the engines, too: on all ranks, while the world still stands.
        """
        if self._scorer is not None:
            self._scorer.close()
        self.records.close()
        for generation in self.records.generations:
            generation.close(engine=engines)

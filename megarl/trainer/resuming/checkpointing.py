"""Saves what a run's next step depends on, and brings it back: everything that has joined the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from megarl.checkpoint.agreement import on_every_rank
from megarl.checkpoint.folder import Position, prune_checkpoints, read_state
from megarl.checkpoint.store import SaveFailed, load_checkpoint, save_checkpoint
from megarl.parallel.world import World
from megarl.roles.frozen import Reference
from megarl.roles.model import MegatronModel
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import Report
from megarl.trainer.resuming.arrays import HasArrays, file_of, read_arrays, write_arrays
from megarl.trainer.resuming.best import BestCheckpoint, finite
from megarl.trainer.resuming.model_files import write_model_files
from megarl.trainer.resuming.resume import Start
from megarl.trainer.stopped import RunRefused, RunStopped

ACTOR = "actor"
"""The model whose tensors have no prefix in a checkpoint, and whose Hugging Face files are in it."""

REWARD_MODEL = "reward_model"
"""Whose Hugging Face files are in a checkpoint without an actor."""

RESERVED = frozenset(
    {"format", "identity", "loop", "models", "order", "phase", "rng", "row", "step", "validation", "world_size"}
)
"""Names in a checkpoint's small state that are the run's own."""


class SavedState(Protocol):
    """What is saved of something that the next step depends on."""

    def state(self) -> Any:
        """JSON values."""
        ...


class Stateful(SavedState, Protocol):
    """Something small that the next step depends on, the same on every rank. What is large of it: `HasArrays`."""

    def load_state(self, state: Any) -> None:
        """Go on where `state` was taken."""
        ...


@dataclass(frozen=True)
class KeptState:
    """What a `Stateful` was."""

    value: Any

    def state(self) -> Any:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is small at the beginning of a step: with models that the step has not changed, the end of the one before.

    Attributes:
        states: what each `Stateful` was, by name.
        numbers: the states of this rank's random number generators.
    """

    states: Mapping[str, SavedState]
    numbers: Sequence[torch.Tensor]


class Checkpointing:
    """Knows what is saved, and the latest checkpoint.

    Attributes:
        models: what has joined, by name.
        latest: folder of the checkpoint that was written or read last.
        position: its position.
        failure: why the last checkpoint could not be written; None if it was.
        best: the checkpoint with the best validation.
    """

    def __init__(self, inputs: Inputs, world: World, start: Start, report: Report) -> None:
        self._inputs, self._config, self._world, self._report = inputs, inputs.config, world, report
        self.models: dict[str, MegatronModel] = {}
        self._states: dict[str, Stateful] = {}
        self.latest, self.position = start.folder, start.position if start.folder else None
        self.failure: str | None = None
        self.best = BestCheckpoint(self._config, world, start.position)

    def add_model(self, name: str, model: MegatronModel) -> None:
        """Save it from now on; raises ValueError if the name is taken."""
        self._check_name(name)
        self.models[name] = model

    def add_state(self, name: str, state: Stateful) -> None:
        """Save it from now on; raises ValueError if the name is taken."""
        self._check_name(name)
        self._states[name] = state

    def keep(self) -> Kept:
        """What `save` needs later, if the step that begins now fails."""
        states = {
            name: joined.keep() if isinstance(joined, HasArrays) else KeptState(joined.state())
            for name, joined in self._states.items()
        }
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        return Kept(states=states, numbers=[torch.get_rng_state(), *cuda])

    def save(self, position: Position, row: int, validation: Mapping[str, float], kept: Kept | None = None) -> bool:
        """A checkpoint. One that cannot be written is said, and the earlier ones stay; returns whether it was.

        Args:
            row: the metric files' number of the step.
            validation: metrics of the validation after it; empty if there was none.
            kept: at the end of that step, if another one has begun.

        Raises:
            RunStopped: something to save is not finite.
        """
        run_dir, world = self._config.trainer.run_dir, self._world
        try:
            sharded = {name: self._sharded(name, loading=False) for name in self.models}
        except ValueError as e:
            raise RunStopped(f"not saved: {e}; the last checkpoint is {self.latest or 'none'}") from e
        if problem := self._world.broadcast(self._report.folder_problem(), "a look at the run's folder"):
            raise RunStopped(f"step {position.step} is not saved: {problem}")
        exported = self.models.get(ACTOR, self.models.get(REWARD_MODEL))
        if kept is not None:
            torch.set_rng_state(kept.numbers[0])
            for cuda in kept.numbers[1:]:
                torch.cuda.set_rng_state(cuda)
        states: Mapping[str, SavedState] = kept.states if kept else self._states
        try:
            self.latest = save_checkpoint(
                run_dir,
                position,
                sharded,
                {
                    **{name: joined.state() for name, joined in states.items()},
                    "row": row,
                    "models": sorted(self.models),
                    "identity": self._inputs.identity,
                    "validation": finite(validation),
                },
                write_model=partial(self._write_beside, exported, states),
                world=world,
            )
        except SaveFailed as e:
            self.failure = str(e)
            self._report.warn(self.failure)
            return False
        self.position, self.failure = position, None
        self.best.saved(self.latest, validation)
        if self._config.checkpoint.save_hf:
            self._report.artifact(os.path.join(self.latest, "huggingface"))
        if self._world.rank == 0:
            keep = self._config.trainer.max_ckpt_to_keep
            for problem in prune_checkpoints(run_dir, keep, self.latest, self.best.folder):
                self._report.warn(problem)
        return True

    def load(self, folder: str, state: Mapping[str, Any] | None) -> None:
        """Everything that has joined, with the random numbers. A reference that the checkpoint lacks becomes a copy of
        its policy as it is there.

        Args:
            state: the checkpoint's small state; None: the run goes back, what is small stays as it is, and so does a
                model that joined after the checkpoint.

        Raises:
            RunRefused: the checkpoint cannot be read, or lacks another model.
        """
        there = saved_models(read_state(folder) if state is None else state)
        saved = {name for name in self.models if name in there}
        copies = {name: model for name, model in self.models.items() if isinstance(model, Reference)}
        for name in self.models.keys() - saved - copies.keys():
            raise RunRefused(f"checkpoint '{folder}' has no model '{name}', which this run trains")
        wanted = {name: self._sharded(name, loading=True) for name in self.models if name in saved}
        try:
            loaded = load_checkpoint(folder, wanted, rng=True, world=self._world)
        except ValueError as e:
            raise RunRefused(str(e)) from e
        for name in wanted:
            self.models[name].load_sharded(loaded[name], _prefix(name))
        if state is None:
            return
        for name in copies.keys() - saved:
            copies[name].renew()
        try:
            for name, joined in self._states.items():
                if state.get(name) is not None:
                    joined.load_state(state[name])
                    if isinstance(joined, HasArrays):
                        joined.load_arrays(read_arrays(file_of(folder, name), self._world))
        except ValueError as e:
            raise RunRefused(f"checkpoint '{folder}': {e}") from e

    def _write_beside(self, exported: MegatronModel | None, states: Mapping[str, SavedState], folder: str) -> None:
        """What stands beside the tensors: arrays of what joined, and the model's Hugging Face files."""

        def write() -> None:
            for name, joined in states.items():
                if isinstance(joined, HasArrays) and self._world.rank == 0:
                    write_arrays(file_of(folder, name), joined.arrays())

        on_every_rank(self._world, write)
        write_model_files(self._inputs, exported, folder)

    def _check_name(self, name: str) -> None:
        if name in self.models or name in self._states or name in RESERVED:
            raise ValueError(f"what joins a run as '{name}' needs another name: this one is taken")

    def _sharded(self, name: str, *, loading: bool) -> dict[str, Any]:
        return self.models[name].sharded_state(_prefix(name), loading=loading)


def saved_models(state: Mapping[str, Any]) -> set[str]:
    """Which models a checkpoint has, from its small state."""
    if "models" in state:
        return set(state["models"])
    roles = state.get("identity", {}).get("roles", {"reference": True})  # of before a checkpoint listed them
    return {ACTOR, "reference"} if roles["reference"] else {ACTOR}


def _prefix(name: str) -> str:
    return "" if name == ACTOR else f"{name}."

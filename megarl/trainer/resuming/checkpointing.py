"""Saves the state on which a run's next step depends, and brings it back: everything that has joined the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megarl.checkpoint.arrays import Array, read_arrays
from megarl.checkpoint.folder import Position, prune_checkpoints, read_state
from megarl.checkpoint.store import Saved, SaveFailed, load_checkpoint, rng_state, save_checkpoint
from megarl.parallel.world import World
from megarl.roles.model import MegatronModel
from megarl.roles.reference import Reference
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import Report
from megarl.trainer.resuming.best import BestCheckpoint, finite
from megarl.trainer.resuming.model_files import write_model_files
from megarl.trainer.resuming.resume import Start
from megarl.trainer.stopped import RunRefused, RunStopped

ACTOR = "actor"
"""The model whose tensors have no prefix in a checkpoint, and whose Hugging Face files are in it."""

REWARD_MODEL = "reward_model"
"""The model whose Hugging Face files are in a checkpoint without an actor."""

RESERVED = frozenset(
    {"format", "identity", "loop", "models", "order", "rng", "row", "step", "validation", "world_size"}
)
"""Names in a checkpoint's small state that are the run's own."""


class Stateful(Protocol):
    """Something small on which the next step depends, the same on every rank."""

    def state(self) -> Any:
        """Take the small state, in JSON's values."""
        ...

    def load_state(self, state: Any) -> None:
        """Go on where `state` was taken."""
        ...


@runtime_checkable
class HasArrays(Protocol):
    """A `Stateful` with more state than fits in JSON, the same on every rank."""

    def keep(self) -> HasArrays:
        """Copy it for a save that may come later; `arrays` of the copy are made then."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Take the large state, by name."""
        ...

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Go on where `arrays` were taken. Raises ValueError, in one line, if they do not fit."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A run's state between two steps, but for its models.

    Attributes:
        states: small state by name.
        large: owners of large state by name, as they were.
        rng: states of this rank's random number generators.
    """

    states: Mapping[str, Any]
    large: Mapping[str, HasArrays]
    rng: Mapping[str, Tensor]


class Checkpointing:
    """Knows what is saved, and the latest checkpoint.

    Attributes:
        models: models that have joined, by name.
        latest: folder of the checkpoint that was written or read last.
        position: position of that checkpoint.
        failure: reason why the last checkpoint could not be written; None if it was.
        best: the checkpoint with the best validation.
    """

    def __init__(self, inputs: Inputs, world: World, start: Start, report: Report) -> None:
        self._inputs, self._config, self._world, self._report = inputs, inputs.config, world, report
        self.models: dict[str, MegatronModel] = {}
        self._states: dict[str, Stateful] = {}
        self.latest, self.position = start.folder, start.position if start.folder else None
        self.failure: str | None = None
        self.best = BestCheckpoint(self._config, world, start.position)
        self._identity = start.identity

    def add_model(self, name: str, model: MegatronModel) -> None:
        """Save it from now on; raises ValueError if the name is taken."""
        self._check_name(name)
        self.models[name] = model

    def add_state(self, name: str, state: Stateful) -> None:
        """Save it from now on; raises ValueError if the name is taken."""
        self._check_name(name)
        self._states[name] = state

    def keep(self) -> Kept:
        """Copy what `save` needs later, if the step that begins now fails."""
        return Kept(
            states={name: joined.state() for name, joined in self._states.items()},
            large={name: joined.keep() for name, joined in self._states.items() if isinstance(joined, HasArrays)},
            rng=rng_state(),
        )

    def save(
        self, position: Position, row: int, validation: Mapping[str, float], kept: Kept | None = None
    ) -> Saved | None:
        """Save a checkpoint; every rank calls it.

        Args:
            row: the metric files' number of the step.
            validation: metrics of the validation after it; empty if there was none.
            kept: at the end of that step, if another one has begun.

        Returns:
            the checkpoint; None if it could not be written. A warning says so then, and the earlier ones stay.

        Raises:
            RunStopped: a value to save is not finite.
        """
        kept = kept or self.keep()
        try:
            sharded = {name: self._sharded(name, loading=False) for name in self.models}
        except ValueError as e:
            raise RunStopped(f"not saved: {e}; the last checkpoint is {self.latest or 'none'}") from e
        if problem := self._world.broadcast(self._report.folder_problem(), "a look at the run's folder"):
            raise RunStopped(f"step {position.step} is not saved: {problem}")
        state = {
            **kept.states,
            "row": row,
            "models": sorted(self.models),
            "identity": self._identity,
            "validation": finite(validation),
        }
        large = kept.large if self._world.rank == 0 else {}
        exported = self.models.get(ACTOR, self.models.get(REWARD_MODEL))
        try:
            saved = save_checkpoint(
                self._config.trainer.run_dir,
                position,
                sharded,
                state,
                arrays={name: joined.arrays() for name, joined in large.items()},
                rng=kept.rng,
                write_model=partial(write_model_files, self._inputs, exported),
                world=self._world,
            )
        except SaveFailed as e:
            self.failure = str(e)
            self._report.warn(self.failure)
            return None
        self._after(saved, validation)
        return saved

    def _after(self, saved: Saved, validation: Mapping[str, float]) -> None:
        """Take note of a new checkpoint, and delete old ones."""
        self.latest, self.position, self.failure = saved.folder, saved.position, None
        self.best.saved(saved.folder, validation)
        if self._config.checkpoint.save_hf:
            self._report.artifact(os.path.join(saved.folder, "huggingface"))
        if self._world.rank == 0:
            trainer = self._config.trainer
            for problem in prune_checkpoints(trainer.run_dir, trainer.max_ckpt_to_keep, saved.folder, self.best.folder):
                self._report.warn(problem)

    def load(self, folder: str, state: Mapping[str, Any] | None) -> None:
        """Bring back all that has joined, with the random numbers; every rank calls it.

        A reference that the checkpoint lacks becomes a copy of its policy as it is there.

        Args:
            state: the checkpoint's small state. None: the run goes back; states stay as they are, and so does a model
                that joined after the checkpoint.

        Raises:
            RunRefused: the checkpoint cannot be read, or lacks another model.
        """
        stored = (read_state(folder) if state is None else state)["models"]
        saved = {name for name in self.models if name in stored}
        copies = {name: model for name, model in self.models.items() if isinstance(model, Reference)}
        for name in self.models.keys() - saved - copies.keys():
            raise RunRefused(f"checkpoint '{folder}' has no model '{name}', which this run trains")
        sharded = {name: self._sharded(name, loading=True) for name in self.models if name in saved}
        try:
            loaded = load_checkpoint(folder, sharded, rng=True, world=self._world)
        except ValueError as e:
            raise RunRefused(str(e)) from e
        for name in sharded:
            self.models[name].load_sharded(loaded[name], _prefix(name))
        if state is None:
            return
        for name in sorted(copies.keys() - saved):
            copies[name].renew()
        try:
            for name, joined in self._states.items():
                if state.get(name) is not None:
                    joined.load_state(state[name])
                    if isinstance(joined, HasArrays):
                        joined.load_arrays(read_arrays(folder, name, self._world))
        except ValueError as e:
            raise RunRefused(f"checkpoint '{folder}': {e}") from e

    def _check_name(self, name: str) -> None:
        if name in self.models or name in self._states or name in RESERVED:
            raise ValueError(f"what joins a run as '{name}' needs another name: this one is taken")

    def _sharded(self, name: str, *, loading: bool) -> dict[str, Any]:
        return self.models[name].sharded_state(_prefix(name), loading=loading)


def _prefix(name: str) -> str:
    return "" if name == ACTOR else f"{name}."

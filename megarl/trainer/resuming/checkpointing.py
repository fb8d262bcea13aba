"""Saves the state on which a run's next step depends, and brings it back: everything that has joined the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megarl.checkpoint.arrays import Array, read_arrays
from megarl.checkpoint.export_beside import HUGGINGFACE, export_beside
from megarl.checkpoint.folder import Position, prune_checkpoints, read_state
from megarl.checkpoint.staging import Staging
from megarl.checkpoint.store import (
    Save,
    Saved,
    SaveFailed,
    load_checkpoint,
    rng_state,
    take_snapshot,
)
from megarl.parallel.world import World
from megarl.roles.frozen import Reference
from megarl.roles.model import MegatronModel
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import Report
from megarl.trainer.resuming.best import BestCheckpoint, finite
from megarl.trainer.resuming.model_files import write_model_files
from megarl.trainer.resuming.resume import Start
from megarl.trainer.stopped import RunRefused, RunStopped

ACTOR = "actor"
"""The model whose tensors have no prefix in a checkpoint, and whose Hugging Face files are in it."""

EXPORTED = (ACTOR, "reward_model")
"""The models whose Hugging Face files may be in a checkpoint, the first of them that a run has."""

RESERVED = frozenset(
    {
        "bits",
        "contents",
        "format",
        "identity",
        "loop",
        "models",
        "order",
        "rng",
        "row",
        "step",
        "validation",
        "world_size",
    }
)
"""Names in a checkpoint's small state that are the run's own."""


class Stateful(Protocol):
    """Holds something small on which the next step depends, the same on every rank."""

    def state(self) -> Any:
        """Take the small state, in JSON's values."""
        ...

    def load_state(self, state: Any) -> None:
        """Go on where `state` was taken."""
        ...


@runtime_checkable
class HasArrays(Protocol):
    """Is a `Stateful` with more state than fits in JSON, of which a rank may have a part."""

    def keep(self) -> HasArrays:
        """Copy it for a save that may come later; `arrays` of the copy are made then."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Take this rank's part, by name; nothing on a rank that has none. The first rank has one."""
        ...

    def load_arrays(self, parts: Iterable[Mapping[str, Array]]) -> None:
        """Go on where the arrays of all ranks that had some were taken, after `load_state`.

        Raises:
            ValueError: they do not fit; in one line.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Holds a run's state between two steps, but for its models.

    Attributes:
        states: small state by name.
        large: owners of large state by name, as they were.
        rng: states of this rank's random number generators.
    """

    states: Mapping[str, Any]
    large: Mapping[str, HasArrays]
    rng: Mapping[str, Tensor]


@dataclass(kw_only=True)
class _Writing:
    """Describes a checkpoint that is being written: it has its snapshot, and not yet its name.

    Attributes:
        work: this rank's work in the present stage.
    """

    save: Save
    validation: Mapping[str, float]
    work: Future[Any]


class Checkpointing:
    """Knows what is saved, and the latest checkpoint.

    A checkpoint may still be written while the next steps run. It is the latest one, and the best one, once it has its
    name; earlier ones are not deleted before.

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
        self._staging = Staging() if self._config.checkpoint.async_save else None
        self._local_dir = self._config.checkpoint.local_dir or None
        # one checkpoint is copied from the node's disk while the next one is written there
        self._writer = ThreadPoolExecutor(2 if self._local_dir else 1, thread_name_prefix="checkpoint")
        self._writing: list[_Writing] = []  # the oldest first
        self._pruned: list[Future[list[str]]] = []  # deleting 20 GiB takes seconds

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
        self,
        position: Position,
        row: int,
        validation: Mapping[str, float],
        kept: Kept | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Save a checkpoint; every rank calls it. If it cannot be written, a warning says so, and earlier ones stay.

        Args:
            row: the metric files' number of the step.
            validation: metrics of the validation after it; empty if there was none.
            kept: at the end of that step, if another one has begun.
            wait: return when it is on the disk; otherwise it may be written until `settle`.

        Raises:
            RunStopped: a value to save is not finite.
        """
        self._make_room()
        kept = kept or self.keep()
        try:
            sharded = {name: self._sharded(name, loading=False) for name in self.models}
        except ValueError as e:
            raise RunStopped(f"not saved: {e}; the last checkpoint is {self.latest or 'none'}") from e
        if problem := self._world.broadcast(self._report.folder_problem(), "a look at the run's folder"):
            raise RunStopped(f"step {position.step} is not saved: {problem}")
        large = {name: joined.arrays() for name, joined in kept.large.items()}
        try:
            snapshot = take_snapshot(
                self._config.trainer.run_dir,
                position,
                sharded,
                self._small_state(kept, row, validation),
                arrays={name: arrays for name, arrays in large.items() if arrays},
                rng=kept.rng,
                model_files=self._write_model_files,
                export=self._export if self._config.checkpoint.exports else None,
                keeps_parts="model" in self._config.checkpoint.save_contents,
                local_dir=self._local_dir,
                staging=None if wait else self._staging,
                world=self._world,
            )
        except SaveFailed as e:
            self._failed(e)
            return
        save = Save(snapshot, self._world)
        writing = _Writing(save=save, validation=validation, work=self._writer.submit(save.work))
        self._writing.append(writing)
        if wait or self._staging is None:
            self.settle()
        elif not snapshot.parts.copied:
            self._report.warn("no memory for a copy of the checkpoint: training waits for its files")
            futures.wait([writing.work])

    def _small_state(self, kept: Kept, row: int, validation: Mapping[str, float]) -> dict[str, Any]:
        return {
            **kept.states,
            "row": row,
            "models": sorted(self.models),
            "identity": self._identity,
            "validation": finite(validation),
            "contents": self._config.checkpoint.save_contents,
        }

    def prepare(self) -> None:
        """Take pinned memory for copies while the first steps run; without a GPU a save takes memory as it needs it."""
        if self._staging is not None and self._world.device.type == "cuda":
            optimizer = self._saves_optimizer
            self._staging.prepare(sum(model.saved_bytes(optimizer=optimizer) for model in self.models.values()))

    def settle(self, *, wait: bool = True) -> None:
        """Go on with the checkpoints that are being written, if any are; every rank calls it.

        Args:
            wait: until they are whole; otherwise only as far as all ranks have come.
        """
        while self._writing and (
            wait or all(self._world.all_gather(self._writing[0].work.done(), "a look at a checkpoint's files"))
        ):
            self._go_on()
        while self._pruned and (wait or self._pruned[0].done()):
            for problem in self._pruned.pop(0).result():
                self._report.warn(problem)

    def _write_model_files(self, folder: str) -> None:
        if self._exported is not None:
            write_model_files(self._inputs, self.models[self._exported].kind, folder)

    def _export(self, folder: str) -> None:
        if self._exported is not None:
            export_beside(folder, prefix=_prefix(self._exported), scalar=self.models[self._exported].kind.scalar)

    @property
    def _exported(self) -> str | None:
        return next((name for name in EXPORTED if name in self.models), None)

    def _make_room(self) -> None:
        """Wait until the memory for copies is free, and at most one checkpoint is still on the nodes' own disks."""
        others = 0 if self._local_dir is None else 1
        while len(self._writing) > others or not all(writing.save.copies_are_free for writing in self._writing):
            self._go_on()

    def _go_on(self) -> None:
        """Wait for the present stage of the oldest checkpoint that is being written."""
        writing = self._writing[0]
        try:
            saved = writing.save.go_on(writing.work.result)
        except SaveFailed as e:
            self._writing.remove(writing)
            self._failed(e)
            return
        if saved is None:
            writing.work = self._writer.submit(writing.save.work)
        else:
            self._writing.remove(writing)
            self._after(saved, writing.validation)

    def _failed(self, error: SaveFailed) -> None:
        self.failure = str(error)
        self._report.warn(self.failure)

    def _after(self, saved: Saved, validation: Mapping[str, float]) -> None:
        """Take note of a new checkpoint, and have old ones deleted, before the next one is written."""
        self.latest, self.position, self.failure = saved.folder, saved.position, None
        self.best.saved(saved.folder, validation)
        if self._config.checkpoint.exports:
            self._report.artifact(os.path.join(saved.folder, HUGGINGFACE))
        if self._world.rank == 0:
            trainer = self._config.trainer
            args = trainer.run_dir, trainer.max_ckpt_to_keep, saved.folder, self.best.folder
            self._pruned.append(self._writer.submit(prune_checkpoints, *args))

    def load(self, folder: str, state: Mapping[str, Any] | None) -> None:
        """Bring back all that has joined, with the random numbers; every rank calls it.

        A reference that the checkpoint lacks becomes a copy of its policy as it is there.

        Args:
            state: the checkpoint's small state. None: the run goes back; states stay as they are, and so does a model
                that joined after the checkpoint.

        Raises:
            RunRefused: the checkpoint cannot be read, or lacks another model.
        """
        recorded = read_state(folder) if state is None else state
        stored, optimizer = recorded["models"], "optimizer" in recorded.get("contents", ["optimizer"])
        if not optimizer:
            self._report.warn(f"{folder} holds no optimizer (checkpoint.save_contents): its moments begin anew")
        saved = {name for name in self.models if name in stored}
        copies = {name: model for name, model in self.models.items() if isinstance(model, Reference)}
        for name in self.models.keys() - saved - copies.keys():
            raise RunRefused(f"checkpoint '{folder}' has no model '{name}', which this run trains")
        sharded = {
            name: self._sharded(name, loading=True, optimizer=optimizer) for name in self.models if name in saved
        }
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

    @property
    def _saves_optimizer(self) -> bool:
        return "optimizer" in self._config.checkpoint.save_contents

    def _sharded(self, name: str, *, loading: bool, optimizer: bool | None = None) -> dict[str, Any]:
        optimizer = self._saves_optimizer if optimizer is None else optimizer
        return self.models[name].sharded_state(_prefix(name), loading=loading, optimizer=optimizer)


def _prefix(name: str) -> str:
    return "" if name == ACTOR else f"{name}."

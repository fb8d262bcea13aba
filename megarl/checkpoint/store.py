"""Writes and reads checkpoint folders in Megatron-Core's `dist_checkpointing` format: whole or not at all.

A save begins with `take_snapshot`, which the ranks make together between two steps. Its stages follow: in each of
them a rank works alone, on any thread, and beside the next steps if the snapshot is a copy; `Save.go_on` joins the
ranks between them. After the last one the checkpoint gets its name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.arrays import Array, is_part, write_arrays
from megarl.checkpoint.bit_sums import total_of
from megarl.checkpoint.folder import (
    STATE_FILE,
    Position,
    checkpoint_folder,
    delete,
    partial_folder,
    problem_with,
    read_state,
    take_place,
    whole_checkpoints,
    write_state,
)
from megarl.checkpoint.local_disk import copy_over, forget, local_folder, take
from megarl.checkpoint.manifest import (
    FORMAT,
    FileRecord,
    checksum_problem,
    files_of,
    one_line,
    read_manifest,
    record_files,
    write_manifest,
)
from megarl.checkpoint.rank_failures import RankFailed, first_of, on_every_rank, on_first_rank
from megarl.checkpoint.sharded_files import ShardedParts, difference, read_sharded, remove_parts
from megarl.checkpoint.staging import Staging
from megarl.checkpoint.stored_objects import CheckpointReader
from megarl.parallel.world import World


class SaveFailed(RuntimeError):
    """Says that a checkpoint could not be written; earlier ones are whole, and a run can go on. All ranks raise it."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Names a whole checkpoint on the disk."""

    folder: str
    position: Position


@dataclass(frozen=True, kw_only=True)
class Written:
    """Lists a rank's part of a checkpoint on the disk.

    Attributes:
        results: of the writer of tensors and objects.
        records: of the rank's files, by name.
    """

    results: list[WriteResult]
    records: dict[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Holds the state of a run between two steps, as far as this rank writes it.

    Attributes:
        run_dir: of the run.
        position: the place in the run where it was taken.
        parts: tensors and objects; see `ShardedParts` for which of them are live.
        state: small state, which the first rank writes.
        arrays: this rank's part of large state, by name.
        model_files: adds the model's files without weights to the folder that it is given, on the first rank.
        export: adds files that are made from those of all ranks, on the first rank; None adds none.
        keeps_parts: whether `parts` stay beside what `export` has made of them.
        local_dir: on a disk of the node's own, where the parts wait until they are copied; None: they do not wait.
    """

    run_dir: str
    position: Position
    parts: ShardedParts
    state: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, Array]]
    model_files: Callable[[str], None]
    export: Callable[[str], None] | None
    keeps_parts: bool
    local_dir: str | None

    @property
    def final(self) -> str:
        """Name the folder that it becomes."""
        return checkpoint_folder(self.run_dir, self.position)

    @property
    def partial(self) -> str:
        """Name the folder until it is whole."""
        return partial_folder(self.final)

    def stages(self) -> Generator[Callable[[], Any], list[Any], None]:
        """Yield this rank's work, which may raise OSError. The first rank is sent what all ranks have returned."""
        first, local = self.parts.rank == 0, self.local
        written: list[Written] = yield partial(self._write, local or self.partial)
        yield partial(self._describe, written) if first else _nothing
        if local is not None:
            yield partial(copy_over, local, self.partial, sorted(self.parts.records))
        if self.export is not None:
            yield partial(self._export, written) if first else _nothing

    @property
    def local(self) -> str | None:
        """Name the folder on the node's own disk where its parts wait; None: they do not wait."""
        if self.local_dir is None:
            return None
        return os.path.join(local_folder(self.local_dir, self.run_dir), self.position.name)

    def _write(self, place: str) -> Written:
        """Write this rank's files, the parts into `place`, to the disk."""
        if place != self.partial:
            take(place)
        own = [write_arrays(self.partial, name, arrays, self.parts.rank) for name, arrays in self.arrays.items()]
        if self.parts.rank == 0:
            write_state(self.partial, self.state)
            self.model_files(self.partial)
        with _without_warnings():
            results = self.parts.write(place)
        records = self.parts.records
        if self.parts.rank == 0:
            # all but the parts of other ranks
            rest = [name for name in files_of(self.partial) if not (name.endswith(DEFAULT_SUFFIX) or is_part(name))]
            own = sorted(set(rest) - records.keys())
        return Written(results=results, records=records | record_files(self.partial, own, sync=True))

    def _describe(self, written: Sequence[Written]) -> None:
        """Describe all parts, and list all files, of which some may still be on the nodes' own disks."""
        with _without_warnings():
            self.parts.finish(self.partial, [of_rank.results for of_rank in written])
        self._list(_records(written))

    def _export(self, written: Sequence[Written]) -> None:
        assert self.export is not None
        self.export(self.partial)
        if not self.keeps_parts:
            remove_parts(self.partial)
        present = files_of(self.partial)
        self._list({name: record for name, record in _records(written).items() if name in present})

    def _list(self, records: dict[str, FileRecord]) -> None:
        """Write the list of these files and all others in the folder."""
        rest = [name for name in files_of(self.partial) if name not in records]
        write_manifest(self.partial, records | record_files(self.partial, rest, sync=True))


class Save:
    """Takes a snapshot through its stages.

    Attributes:
        work: of this rank in the present stage.
        copies_are_free: whether the copies in the snapshot are written, on every rank.
    """

    def __init__(self, snapshot: Snapshot, world: World) -> None:
        self._snapshot, self._world = snapshot, world
        self._stages = snapshot.stages()
        self.work = next(self._stages)
        self.copies_are_free = False

    def go_on(self, done: Callable[[], Any]) -> Saved | None:
        """Wait for this stage on all ranks, and begin the next one. Every rank calls it.

        Until the checkpoint has its name a job that dies leaves the earlier ones as they were, one of the same name
        included.

        Args:
            done: does `work`, or gives the result or the error of a thread that has done it.

        Returns:
            the checkpoint, which has its name now; None if there is another stage.

        Raises:
            SaveFailed: on every rank, if any of them could not do its work (a full disk, say); nothing is left.
        """
        snapshot, world = self._snapshot, self._world
        with _or_give_up(snapshot.run_dir, snapshot.position, world, local=snapshot.local):
            results = world.gather(on_every_rank(world, done), "all parts of a checkpoint")
            self.copies_are_free = True
            try:
                self.work = self._stages.send(results)
            except StopIteration:
                on_first_rank(world, partial(take_place, snapshot.partial, snapshot.final))
                return Saved(folder=snapshot.final, position=snapshot.position)
        return None

    def finish(self) -> Saved:
        """Do all stages in this thread; see `go_on`."""
        while (saved := self.go_on(self.work)) is None:
            pass
        return saved


def take_snapshot(
    run_dir: str,
    position: Position,
    sharded: dict[str, Any],
    trainer_state: Mapping[str, Any],
    *,
    arrays: Mapping[str, Mapping[str, Array]] | None = None,
    rng: Mapping[str, Tensor] | None = None,
    model_files: Callable[[str], None],
    export: Callable[[str], None] | None = None,
    keeps_parts: bool = True,
    local_dir: str | None = None,
    staging: Staging | None = None,
    world: World,
) -> Snapshot:
    """Plan a checkpoint, and begin its partial folder. Every rank calls it.

    Args:
        sharded: Megatron-Core sharded state dict of this rank.
        trainer_state: small JSON-able state, the same on every rank; the position is added.
        arrays: this rank's part of large state, by name; of a rank that has none the name is missing.
        rng: as `rng_state` gave it; default: the generators as they are now.
        model_files, export, keeps_parts, local_dir: see `Snapshot`; they may raise OSError.
        staging: takes a copy of all tensors, so that they may change before they are written.

    Raises:
        SaveFailed: on every rank, if any of them could not write; nothing is left of the attempt.
    """
    folder = partial_folder(checkpoint_folder(run_dir, position))
    generators = ShardedObject("rng", rng or rng_state(), (world.size,), (world.rank,))
    with _or_give_up(run_dir, position, world):
        on_first_rank(world, lambda: _make_empty(folder))
        with _without_warnings():
            parts = ShardedParts({**sharded, "rng": generators}, world, staging)
    of_position = {"format": FORMAT, "loop": position.loop, "order": position.order, "step": position.step}
    bits = {key: f"{value:016x}" for key, value in sorted(parts.bits.items())}
    state = {**trainer_state, **of_position, "world_size": world.size, "bits": bits}
    return Snapshot(
        run_dir=run_dir,
        position=position,
        parts=parts,
        state=state,
        arrays=arrays or {},
        model_files=model_files,
        export=export,
        keeps_parts=keeps_parts,
        local_dir=local_dir,
    )


def verify_checkpoint(folder: str, world: World) -> str | None:
    """Compare every file with the manifest; the ranks share the reading. Every rank calls it.

    Returns:
        on every rank the same line, which names the first file that differs from what was written; None if none does.
    """
    problem = problem_with(folder)
    if problem is None:
        records = read_manifest(folder)
        problem = checksum_problem(folder, records, sorted(records)[world.rank :: world.size])
    return first_of(world, problem)


def load_checkpoint(folder: str, sharded: dict[str, Any], *, rng: bool, world: World) -> dict[str, Any]:
    """Read a checkpoint into the layout of `sharded`, which may differ from the one that wrote it.

    Args:
        rng: restore the random number generators too, where the number of ranks is the same.

    Returns:
        the state dict to load from.

    Raises:
        ValueError: on every rank, in one line: the checkpoint cannot be read, or is that of another model or run.
    """
    recorded = read_state(folder) if os.path.isfile(os.path.join(folder, STATE_FILE)) else {}
    rng = rng and recorded.get("world_size") == world.size
    if rng:
        sharded = {**sharded, "rng": ShardedObject("rng", rng_state(), (world.size,), (world.rank,))}
    loaded: dict[str, Any] = {}
    bits: dict[str, int] = {}
    problem: str | None = None
    with _without_warnings():
        try:
            reader = CheckpointReader(folder)
            problem = difference(reader, sharded)
        except ValueError as e:
            problem = one_line(e)
        if (problem := first_of(world, problem)) is None:
            try:
                loaded, bits = read_sharded(folder, reader, sharded)
            except Exception as e:  # whatever reading a damaged file raises
                problem = one_line(e) if isinstance(e, ValueError) else f"it cannot be read: {one_line(e)}"
            read = world.all_gather(bits, "the bits that were read")
            problem = first_of(world, problem) or _other_bits(recorded, read)
    if problem is not None:
        raise ValueError(f"checkpoint '{folder}': {problem}")
    if rng:
        torch.set_rng_state(loaded["rng"]["torch"])
        if "cuda" in loaded["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(loaded["rng"]["cuda"])
    return loaded


def rng_state() -> dict[str, Tensor]:
    """Copy the states of this rank's random number generators."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"torch": torch.get_rng_state(), **cuda}


def _other_bits(recorded: Mapping[str, Any], read: Iterable[Mapping[str, int]]) -> str | None:
    """Name the first tensor that is not what it was on the ranks that saved it."""
    known = recorded.get("bits", {})
    for key, value in sorted(total_of(read).items()):
        if known.get(key, f"{value:016x}") != f"{value:016x}":
            return f"{key} is not what was saved: its bits have another sum"
    return None


def _make_empty(folder: str) -> None:
    delete(folder)
    os.makedirs(folder)


def _records(written: Sequence[Written]) -> dict[str, FileRecord]:
    return {name: record for of_rank in written for name, record in of_rank.records.items()}


def _nothing() -> None:
    """Do nothing: on the ranks beside the first."""


@contextmanager
def _or_give_up(run_dir: str, position: Position, world: World, *, local: str | None = None) -> Iterator[None]:
    """Delete the partial folder, and what waits on each node, if a rank fails. Raises SaveFailed with the same line on
    all ranks."""
    try:
        yield
    except RankFailed as e:
        line = None
        if local is not None:
            forget(local)
        if world.rank == 0:
            final = checkpoint_folder(run_dir, position)
            with suppress(OSError):
                delete(partial_folder(final))
            newest = next(iter(whole_checkpoints(run_dir)), "none")
            line = (
                f"{position.name} could not be saved in '{os.path.dirname(final)}': {e}; the newest whole checkpoint "
                f"there is {os.path.basename(newest)}"
            )
        raise SaveFailed(world.broadcast(line, "all ranks at a checkpoint")) from None


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep torch's and Megatron-Core's remarks on their own formats from the console."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

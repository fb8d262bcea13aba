"""Writes and reads checkpoint folders in Megatron-Core's `dist_checkpointing` format: whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megarl.checkpoint.agreement import RankFailed, first_of, on_every_rank
from megarl.checkpoint.folder import (
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
from megarl.checkpoint.manifest import (
    FORMAT,
    checksum_problem,
    files_of,
    one_line,
    read_manifest,
    record_files,
    write_manifest,
)
from megarl.checkpoint.sharded_files import difference, read_sharded, write_sharded
from megarl.checkpoint.stored_objects import CheckpointReader
from megarl.parallel.world import World

T = TypeVar("T")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were, and a run can go on. All ranks raise it."""


def save_checkpoint(
    run_dir: str,
    position: Position,
    sharded: dict[str, Any],
    trainer_state: dict[str, Any],
    *,
    write_model: Callable[[str], None],
    world: World,
) -> str:
    """Write `global_step_{step}`; every rank calls it, and it returns once the checkpoint is complete and on the disk.

    Everything is written into a folder of another name, which is renamed when it is whole: a job that dies in between
    leaves the earlier checkpoints as they were, one of the same name included.

    Args:
        sharded: Megatron-Core sharded state dict of this rank.
        trainer_state: small JSON-able state, the same on every rank; the position is added.
        write_model: called on every rank with the unfinished folder, to add the model's Hugging Face files. If it
            raises an OSError, it does so on every rank.

    Returns:
        the checkpoint's folder.

    Raises:
        SaveFailed: on every rank, if any of them could not write (a full disk, say); nothing is left of the attempt.
    """
    final = checkpoint_folder(run_dir, position)
    partial = partial_folder(final)
    of_position = {"format": FORMAT, "loop": position.loop, "order": position.order, "step": position.step}
    state = {**trainer_state, **of_position, "world_size": dist.get_world_size()}
    try:
        _on_first_rank(world, lambda: _make_empty(partial))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_sharded(partial, {**sharded, "rng": _rng_state()}, world)
        write_model(partial)
        _on_first_rank(world, lambda: write_state(partial, state))
        _write_manifest(partial, world)
        _on_first_rank(world, lambda: take_place(partial, final))
    except RankFailed as e:
        raise SaveFailed(_give_up(run_dir, position, partial, str(e), world)) from None
    return final


def verify_checkpoint(folder: str, world: World) -> str | None:
    """Compare every file with the manifest; the ranks share the reading. Every rank calls it.

    Returns:
        on every rank the same line, which names the first file that is not as it was written; None if there is none.
    """
    problem = problem_with(folder)
    if problem is None and (records := read_manifest(folder)) is not None:
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
    rng = rng and read_state(folder).get("world_size") == dist.get_world_size()
    sharded = {**sharded, "rng": _rng_state()} if rng else sharded
    loaded: dict[str, Any] = {}
    problem: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader = CheckpointReader(folder)
            problem = difference(reader, sharded)
        except ValueError as e:
            problem = one_line(e)
        if (problem := first_of(world, problem)) is None:
            try:
                loaded = read_sharded(folder, reader, sharded)
            except Exception as e:  # whatever reading a damaged file raises
                problem = one_line(e) if isinstance(e, ValueError) else f"it cannot be read: {one_line(e)}"
            problem = first_of(world, problem)
    if problem is not None:
        raise ValueError(f"checkpoint '{folder}': {problem}")
    if rng:
        _set_rng_state(loaded["rng"])
    return loaded


def _make_empty(folder: str) -> None:
    delete(folder)
    os.makedirs(folder)


def _on_first_rank(world: World, work: Callable[[], T]) -> T | None:
    """What the work gives, on the first rank; it fails on all."""

    def local() -> T | None:
        return work() if world.rank == 0 else None

    return on_every_rank(world, local)


def _write_manifest(folder: str, world: World) -> None:
    """The ranks share the hashing: each takes every world-th file, and waits until it is on the disk."""
    listed = world.broadcast(_on_first_rank(world, lambda: files_of(folder)), "a checkpoint's files")
    mine = on_every_rank(world, lambda: record_files(folder, listed[world.rank :: world.size], sync=True))
    everyone = world.gather(mine, "the checksums of a checkpoint")
    records = {name: record for part in everyone for name, record in part.items()}
    _on_first_rank(world, lambda: write_manifest(folder, records))


def _give_up(run_dir: str, position: Position, partial: str, reason: str, world: World) -> str:
    """Make room again; returns what all ranks say."""
    said = None
    if world.rank == 0:
        with suppress(OSError):
            delete(partial)
        newest = next(iter(whole_checkpoints(run_dir)), None)
        said = (
            f"{position.name} could not be saved in '{os.path.dirname(partial)}': {reason}; the newest whole "
            f"checkpoint there is {os.path.basename(newest) if newest else 'none'}"
        )
    said = first_of(world, said)
    assert said is not None
    return said


def _rng_state() -> ShardedObject:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

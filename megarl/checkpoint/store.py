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
from megarl.parallel.control import broadcast, gather

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
    control: dist.ProcessGroup,
) -> str:
    """Write `global_step_{step}`; every rank calls it, and it returns once the checkpoint is complete and on the disk.

    Everything is written into a folder of another name, which is renamed when it is whole: a job that dies in between
    leaves the earlier checkpoints as they were, one of the same name included.

    Args:
        sharded: Megatron-Core sharded state dict of this rank.
        trainer_state: small JSON-able state, the same on every rank; the position is added.
        write_model: called on every rank with the unfinished folder, to add the model's Hugging Face files. If it
            raises an OSError, it does so on every rank.
        control: all ranks, over gloo.

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
        _on_first_rank(control, lambda: _make_empty(partial))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_sharded(partial, {**sharded, "rng": _rng_state()}, control)
        write_model(partial)
        _on_first_rank(control, lambda: write_state(partial, state))
        _write_manifest(partial, control)
        _on_first_rank(control, lambda: take_place(partial, final))
    except RankFailed as e:
        raise SaveFailed(_give_up(run_dir, position, partial, str(e), control)) from None
    return final


def verify_checkpoint(folder: str, control: dist.ProcessGroup) -> str | None:
    """Compare every file with the manifest; the ranks share the reading. Every rank calls it.

    Returns:
        on every rank the same line, which names the first file that is not as it was written; None if there is none.
    """
    rank, world = dist.get_rank(control), dist.get_world_size(control)
    problem = problem_with(folder)
    if problem is None and (records := read_manifest(folder)) is not None:
        problem = checksum_problem(folder, records, sorted(records)[rank::world])
    return first_of(control, problem)


def load_checkpoint(folder: str, sharded: dict[str, Any], *, rng: bool, control: dist.ProcessGroup) -> dict[str, Any]:
    """Read a checkpoint into the layout of `sharded`, which may differ from the one that wrote it.

    Args:
        rng: restore the random number generators too, where the number of ranks is the same.
        control: all ranks, over gloo.

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
        if (problem := first_of(control, problem)) is None:
            try:
                loaded = read_sharded(folder, reader, sharded)
            except Exception as e:  # whatever reading a damaged file raises
                problem = one_line(e) if isinstance(e, ValueError) else f"it cannot be read: {one_line(e)}"
            problem = first_of(control, problem)
    if problem is not None:
        raise ValueError(f"checkpoint '{folder}': {problem}")
    if rng:
        _set_rng_state(loaded["rng"])
    return loaded


def _make_empty(folder: str) -> None:
    delete(folder)
    os.makedirs(folder)


def _on_first_rank(control: dist.ProcessGroup, work: Callable[[], T]) -> T | None:
    """What the work gives, on the first rank; it fails on all."""

    def local() -> T | None:
        return work() if dist.get_rank(control) == 0 else None

    return on_every_rank(control, local)


def _write_manifest(folder: str, control: dist.ProcessGroup) -> None:
    """The ranks share the hashing: each takes every world-th file, and waits until it is on the disk."""
    rank, world = dist.get_rank(control), dist.get_world_size(control)
    listed = broadcast(control, _on_first_rank(control, lambda: files_of(folder)), "a checkpoint's files")
    mine = on_every_rank(control, lambda: record_files(folder, listed[rank::world], sync=True))
    everyone = gather(control, mine, "the checksums of a checkpoint")
    records = {name: record for part in everyone for name, record in part.items()}
    _on_first_rank(control, lambda: write_manifest(folder, records))


def _give_up(run_dir: str, position: Position, partial: str, reason: str, control: dist.ProcessGroup) -> str:
    """Make room again; returns what all ranks say."""
    said = None
    if dist.get_rank(control) == 0:
        with suppress(OSError):
            delete(partial)
        newest = next(iter(whole_checkpoints(run_dir)), None)
        said = (
            f"{position.name} could not be saved in '{os.path.dirname(partial)}': {reason}; the newest whole "
            f"checkpoint there is {os.path.basename(newest) if newest else 'none'}"
        )
    said = first_of(control, said)
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

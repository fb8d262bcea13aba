"""Writes and reads checkpoint folders in Megatron-Core's `dist_checkpointing` format: whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
    FileRecord,
    checksum_problem,
    files_of,
    one_line,
    read_manifest,
    record_files,
    write_manifest,
)
from megarl.checkpoint.sharded_files import write_sharded

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = first_of(control, _difference(folder, sharded))
        if problem is None:
            try:
                loaded = dist_checkpointing.load(sharded, folder)
            except (Exception, CheckpointException) as e:
                problem = f"it cannot be read: {_cause(e)}"
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
    listed = [_on_first_rank(control, lambda: files_of(folder))]
    dist.broadcast_object_list(listed, group=control, group_src=0)
    mine = on_every_rank(control, lambda: record_files(folder, (listed[0] or [])[rank::world], sync=True))
    everyone: list[dict[str, FileRecord]] = [{} for _ in range(world)]
    dist.gather_object(mine, everyone if rank == 0 else None, group=control, group_dst=0)
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


def _difference(folder: str, sharded: dict[str, Any]) -> str | None:
    """The first tensor or object that this rank wants and that the checkpoint has not, or has in another shape."""
    try:
        dist_checkpointing.load_common_state_dict(folder)
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as e:
        return f"it cannot be read: {_cause(e)}"
    for wanted in nested_values(load_preprocess(sharded)[0]):
        if isinstance(wanted, ShardedObject):
            if wanted.unique_key not in stored:
                return f"it has no {wanted.unique_key}, which this run needs"
        elif isinstance(wanted, ShardedTensor):
            found = stored.get(wanted.key)
            shape = list(wanted.global_shape)
            if not isinstance(found, TensorStorageMetadata):
                return f"it has no {wanted.key}, which this run needs with shape {shape}"
            if list(found.size) != shape and not wanted.allow_shape_mismatch:
                return f"its {wanted.key} has shape {list(found.size)}, this run's has {shape}"
    return None


def _cause(error: BaseException) -> str:
    """One line; of what `torch.distributed.checkpoint` raises, what the first rank says that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"{_cause(first)} (rank {rank})"
    said = one_line(error)
    return said if said == type(error).__name__ else f"{said} ({type(error).__name__})"


def _rng_state() -> ShardedObject:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

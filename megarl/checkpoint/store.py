"""Writes and reads checkpoint folders through Megatron-Core's `dist_checkpointing`: whole or not at all."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megarl.checkpoint.folder import checkpoint_folder, complete_checkpoints, read_state, write_state


def save_checkpoint(
    run_dir: str,
    step: int,
    sharded: dict[str, Any],
    trainer_state: dict[str, Any],
    *,
    write_model: Callable[[str], None],
    control: dist.ProcessGroup,
) -> str:
    """Write `global_step_{step}`; every rank calls it, and it returns once the checkpoint is complete.

    Everything is written into a folder of another name, which is renamed when it is whole: a job that dies in between
    leaves the earlier checkpoints as they were.

    Args:
        sharded: Megatron-Core sharded state dict of this rank.
        trainer_state: small JSON-able state, the same on every rank.
        write_model: called on every rank with the unfinished folder, to add the model's Hugging Face files.
        control: all ranks, over gloo.

    Returns:
        the checkpoint's folder.
    """
    final = checkpoint_folder(run_dir, step)
    partial = os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
    dist.barrier(control)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpointing.save({**sharded, "rng": _rng_state()}, partial)
    write_model(partial)
    dist.barrier(control)
    if dist.get_rank() == 0:
        write_state(partial, {**trainer_state, "world_size": dist.get_world_size()})
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
    dist.barrier(control)
    return final


def load_checkpoint(folder: str, sharded: dict[str, Any], *, rng: bool) -> dict[str, Any]:
    """Read a checkpoint into the layout of `sharded`, which may differ from the one that wrote it.

    Args:
        rng: restore the random number generators too, where the number of ranks is the same.

    Returns:
        the state dict to load from.
    """
    rng = rng and read_state(folder)["world_size"] == dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load({**sharded, "rng": _rng_state()} if rng else sharded, folder)
    if rng:
        _set_rng_state(loaded["rng"])
    return loaded


def prune_checkpoints(run_dir: str, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints."""
    if keep is not None:
        for folder in complete_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(folder)


def _rng_state() -> ShardedObject:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

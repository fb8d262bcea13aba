"""Chooses where a run begins: afresh, or at a checkpoint. Rank 0 chooses for all ranks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.folder import (
    BEGINNING,
    Found,
    Position,
    bring_back_replaced,
    check_resumable,
    checkpoints,
    listed_partials,
    position_of,
    read_state,
    remove_partials,
    set_aside,
    take_place,
)
from megarl.checkpoint.local_disk import bring_missing, forget, local_folder
from megarl.checkpoint.manifest import read_manifest, size_problem
from megarl.config import dump_config
from megarl.config.load import CONFIG_FILE
from megarl.config.trainer import TrainerConfig
from megarl.flow_kinds import flow_kind, trains
from megarl.telemetry.earlier import set_aside_earlier_run
from megarl.telemetry.lines import rewrite
from megarl.telemetry.log_file import keep_log
from megarl.trainer.inputs import Inputs
from megarl.trainer.resuming.identity import Identity, differences, identity_of
from megarl.trainer.run_folder import later_than
from megarl.trainer.run_lock import holder_of
from megarl.trainer.starts import read_parent, record_start
from megarl.trainer.stopped import RunRefused
from megarl.trainer.surroundings import Place, surroundings

if TYPE_CHECKING:  # a launcher checks a run without Megatron-Core
    from megarl.parallel.world import World


@dataclass(frozen=True, kw_only=True)
class Start:
    """Describes the beginning of a run.

    Attributes:
        folder: checkpoint that the run goes on from; None for a fresh run.
        state: small state of the checkpoint.
        differs: parts of the run, of those in `trainer.resume_allow`, that differ from the checkpoint's.
        passed_over: newer checkpoints that no run can go on from.
        identity: of the run, which its checkpoints record.
        places: where each rank is.
    """

    folder: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    differs: frozenset[str] = frozenset()
    passed_over: tuple[Found, ...] = ()
    identity: Identity = field(default_factory=dict)
    places: tuple[Place, ...] = ()

    @property
    def position(self) -> Position:
        """Return the position of the last step that is done."""
        return position_of(dict(self.state)) if self.folder else BEGINNING


def expected_start(inputs: Inputs) -> Start:
    """Choose a beginning without other ranks, as if all checkpoints were as whole as they look.

    Raises:
        ValueError: no checkpoint is whole, or the newest whole one is another run's.
    """
    trainer = inputs.config.trainer
    candidates = _candidates(trainer)
    for candidate in candidates:
        if candidate.problem is None:
            return _start_at(candidate, inputs, identity_of(inputs))
    if candidates:
        raise _none_is_whole(trainer, candidates)
    return Start()


def finished(inputs: Inputs, start: Start) -> str | None:
    """Say that a run has nothing left to do; None if it has."""
    last_loop, total = flow_kind(inputs.config).last_loop, inputs.total_steps
    if last_loop is None or start.position < Position(last_loop[0], total, last_loop[1]):
        return None
    return (
        f"nothing to do: {start.folder} has step {start.position.step}, and the run ends with step "
        f"{total}; raise trainer.total_training_steps or trainer.total_epochs to train on"
    )


def choose_start(inputs: Inputs, identity: Identity, world: World) -> Start:
    """Choose the newest checkpoint that is whole. Every rank calls it.

    It gives checkpoints their names that a death left without; all other changes of the disk are `begin_in_folder`'s.

    Raises:
        ValueError: on every rank; see `expected_start`, and for a rank that does not see the run's folder.
    """
    trainer = inputs.config.trainer
    first = world.rank == 0
    if first:
        bring_back_replaced(trainer.run_dir)
    if trainer.resume_mode != "disable":
        finish_unfinished(trainer.run_dir, inputs.config.checkpoint.local_dir, world)
    candidates, refusal = world.broadcast(_choice(trainer) if first else None, "the choice of a checkpoint")
    if refusal is not None:
        raise ValueError(refusal)
    passed_over: list[Found] = []
    for candidate in candidates:
        check_seen(candidate.folder, world)
        problem = candidate.problem or _damage(inputs, candidate.folder, world)
        if problem is None:
            return replace(_start_at(candidate, inputs, identity), passed_over=tuple(passed_over))
        if trainer.resume_mode == "resume_path":
            raise ValueError(
                f"trainer.resume_from_path = '{candidate.folder}' is damaged: {problem}; give another checkpoint"
            )
        passed_over.append(candidate if candidate.problem else replace(candidate, problem=problem, damaged=True))
    if passed_over:
        raise _none_is_whole(trainer, passed_over)
    return Start(identity=identity)


def _choice(trainer: TrainerConfig) -> tuple[list[Found], str | None]:
    """List what `_candidates` does, and say why none of it can be taken; one just named is in the way as others are."""
    try:
        return _candidates(trainer), later_than(trainer, trainer.resume_from_path)
    except ValueError as e:  # the other ranks wait
        return [], str(e)


def finish_unfinished(run_dir: str, local_dir: str, world: World) -> None:
    """Name checkpoints that dead jobs left unnamed, if all their files are there or on the nodes' own disks.

    Every rank calls it.
    """
    for partial, final in world.broadcast(listed_partials(run_dir) if world.rank == 0 else None, "unnamed checkpoints"):
        if local_dir and _is_first_on_node():
            place = os.path.join(local_folder(local_dir, run_dir), os.path.basename(final))
            bring_missing(place, partial, read_manifest(partial))
        world.barrier("the files on the nodes' own disks")
        if world.rank == 0 and size_problem(partial, read_manifest(partial)) is None:
            take_place(partial, final)
            print(f"megarl: {final} is whole: a job that died had not named it yet", file=sys.stderr, flush=True)


def _is_first_on_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def begin_in_folder(inputs: Inputs, world: World, start: Start) -> None:
    """Make the run's folder ready for the run; every rank calls it.

    The first rank deletes unfinished checkpoints of dead jobs, sets aside damaged checkpoints that are newer than the
    start, and the records of a run that left no checkpoint, writes the configuration and records the start.

    Raises:
        RunRefused: on every rank, if the folder cannot be written, or a rank does not see it.
    """
    from megarl.checkpoint.rank_failures import RankFailed, on_first_rank

    run_dir, local_dir = inputs.config.trainer.run_dir, inputs.config.checkpoint.local_dir
    if local_dir and _is_first_on_node():
        forget(local_folder(local_dir, run_dir))
    try:
        on_first_rank(world, lambda: _take_folder(inputs, start))
        check_seen(os.path.join(run_dir, CONFIG_FILE), world)
        if trains(inputs.config):
            keep_log(run_dir, world.rank, inputs.config.trainer.log_level)
    except RankFailed as e:
        raise RunRefused(f"the run folder {run_dir} cannot be written: {e}; set trainer.default_local_dir") from None
    except ValueError as e:
        raise RunRefused(str(e)) from e


def _take_folder(inputs: Inputs, start: Start) -> None:
    def say(text: str) -> None:
        print(f"megarl: {text}", file=sys.stderr, flush=True)

    run_dir = inputs.config.trainer.run_dir
    for name in remove_partials(run_dir):
        say(f"removed {name}, which a job left that died while it saved")
    for checkpoint in start.passed_over:
        place = f"; it is now {set_aside(checkpoint.folder)}" if checkpoint.damaged else ""
        say(f"skipped {checkpoint.folder}: {checkpoint.problem}{place}")
    if start.folder is None and trains(inputs.config) and (earlier := set_aside_earlier_run(run_dir)):
        say(f"an earlier run in {run_dir} left no checkpoint; its records are now in {earlier}")
    os.makedirs(run_dir, exist_ok=True)
    configuration = dump_config(inputs.config)
    rewrite(os.path.join(run_dir, CONFIG_FILE), configuration.encode(), private=True)
    if trains(inputs.config):
        record_start(run_dir, configuration, _environment(run_dir, start))


def _environment(run_dir: str, start: Start) -> dict[str, Any]:
    holder, is_held = holder_of(run_dir)
    began = holder.get("began") if is_held else None  # when this process took the folder, before it loaded anything
    parent = {"parent": parent} if (parent := read_parent(run_dir)) else {}
    return {"began": began or time.time(), "checkpoint": start.folder, **parent, **surroundings(start.places)}


def _candidates(trainer: TrainerConfig) -> list[Found]:
    """List the checkpoints that `trainer.resume_mode` admits, newest first."""
    if trainer.resume_mode == "disable":
        return []
    if trainer.resume_mode == "resume_path":
        folder = trainer.resume_from_path
        check_resumable(folder)
        state = read_state(folder)
        return [Found(folder=folder, position=position_of(state), state=state, problem=None, damaged=False)]
    return checkpoints(trainer.run_dir)


def _start_at(checkpoint: Found, inputs: Inputs, identity: Identity) -> Start:
    """Begin at a checkpoint. Raises ValueError if it is of another run than `trainer.resume_allow` lets pass."""
    trainer = inputs.config.trainer
    # after the warm-up its settings have had their effect
    ignored = {"warmup"} if checkpoint.position.loop != "warmup" else set()
    other = differences(checkpoint.state["identity"], identity, ignore=ignored)
    refused = {part: how for part, how in other.items() if part not in trainer.resume_allow}
    if refused:
        others = "; another ".join(f"{part} ({how})" for part, how in refused.items())
        raise ValueError(
            f"{checkpoint.folder} is of a run with another {others}: go on with what it began with, or set "
            f"trainer.resume_allow=[{','.join([*trainer.resume_allow, *refused])}]"
        )
    return Start(folder=checkpoint.folder, state=checkpoint.state, differs=frozenset(other), identity=identity)


def _damage(inputs: Inputs, folder: str, world: World) -> str | None:
    if not inputs.config.checkpoint.verify:
        return None
    from megarl.checkpoint.store import verify_checkpoint

    return verify_checkpoint(folder, world)


def check_seen(path: str, world: World) -> None:
    """Refuse a file or folder that rank 0 sees and another rank does not. Raises ValueError on every rank."""
    everyone = world.all_gather((os.path.lexists(path), socket.gethostname()), "all ranks' view of the disk")
    for rank, (seen, host) in enumerate(everyone):
        if not seen:
            raise ValueError(
                f"rank {rank} on {host} does not see {path}: the run's folder must be on a filesystem that all nodes "
                f"share"
            )


def _none_is_whole(trainer: TrainerConfig, passed_over: list[Found]) -> ValueError:
    reasons = "; ".join(f"{os.path.basename(candidate.folder)}: {candidate.problem}" for candidate in passed_over)
    return ValueError(
        f"{trainer.run_dir} has checkpoints, but none is whole ({reasons}): bring one back, or start anew with another "
        f"trainer.default_local_dir"
    )

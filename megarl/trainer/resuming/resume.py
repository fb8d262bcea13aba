"""Where a run begins: afresh, or at a checkpoint. Rank 0 chooses, and every rank goes by its choice."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.folder import (
    BEGINNING,
    Found,
    Position,
    bring_back_replaced,
    check_resumable,
    checkpoints,
    position_of,
    read_state,
    remark_on,
    remove_partials,
    set_aside,
)
from megarl.config import Config, dump_config
from megarl.config.load import CONFIG_FILE
from megarl.config.trainer import TrainerConfig
from megarl.flow_kinds import flow_kind, trains
from megarl.telemetry.earlier import set_aside_earlier_run
from megarl.telemetry.lines import rewrite
from megarl.trainer.inputs import Inputs
from megarl.trainer.resuming.identity import as_recorded_before, differences
from megarl.trainer.stopped import RunRefused

if TYPE_CHECKING:  # a launcher checks a run without Megatron-Core
    from megarl.parallel.world import World


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins.

    Attributes:
        folder: the checkpoint that it goes on from; None for a fresh run.
        state: the checkpoint's small state.
        differs: parts of the run, of those in `trainer.resume_allow`, that are other than the checkpoint's.
        passed_over: newer ones, none of which a run can go on from.
    """

    folder: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    differs: frozenset[str] = frozenset()
    passed_over: tuple[Found, ...] = ()

    @property
    def position(self) -> Position:
        """Of the last step that is done."""
        return position_of(dict(self.state)) if self.folder else BEGINNING


def last_row(start: Start, config: Config) -> int:
    """The metric files' number of the last step that is done."""
    if "row" in start.state:
        return int(start.state["row"])
    position = start.position  # of before a checkpoint recorded it
    return position.step - config.warmup.total_training_steps if position.loop == "warmup" else position.step


def expected_start(inputs: Inputs) -> Start:
    """Where the run will begin if its checkpoints are as whole as they look; needs no other rank.

    Raises:
        ValueError: there is nothing to go on from although the run should, or it is another run's.
    """
    trainer = inputs.config.trainer
    candidates = _candidates(trainer)
    for found in candidates:
        if found.problem is None:
            return _start_at(found, inputs)
    if candidates:
        raise _none_is_whole(trainer, candidates)
    return Start()


def finished(inputs: Inputs, start: Start) -> str | None:
    """What to say of a run that has nothing left to do; None if it has."""
    last_loop, total = flow_kind(inputs.config).last_loop, inputs.total_steps
    if last_loop is None or start.position < Position(last_loop[0], total, last_loop[1]):
        return None
    return (
        f"nothing to do: {start.folder} has step {start.position.step}, and the run ends with step "
        f"{total}; raise trainer.total_training_steps or trainer.total_epochs to train on"
    )


def choose_start(inputs: Inputs, world: World, say: Callable[[str], None]) -> Start:
    """The newest checkpoint that is whole; every rank calls it. Nothing on the disk changes: see `begin_in_folder`.

    Args:
        say: shows a line; what is remarkable about the checkpoint.

    Raises:
        ValueError: on every rank; see `expected_start`, and for a rank that does not see the run's folder.
    """
    trainer = inputs.config.trainer
    first = world.rank == 0
    if first:
        bring_back_replaced(trainer.run_dir)
    candidates = world.broadcast(_candidates(trainer) if first else None, "the choice of a checkpoint")
    passed_over: list[Found] = []
    for found in candidates:
        check_seen(found.folder, world)
        problem = found.problem or _damage(inputs, found.folder, world)
        if problem is None:
            start = replace(_start_at(found, inputs), passed_over=tuple(passed_over))
            if remark := remark_on(found.folder):
                say(f"remark: {remark}")
            if "identity" not in found.state:
                say(f"remark: {found.folder} does not record of which model, data and settings it is")
            return start
        if trainer.resume_mode == "resume_path":
            raise ValueError(
                f"trainer.resume_from_path = '{found.folder}' is damaged: {problem}; give another checkpoint"
            )
        passed_over.append(found if found.problem else replace(found, problem=problem, damaged=True))
    if passed_over:
        raise _none_is_whole(trainer, passed_over)
    return Start()


def begin_in_folder(inputs: Inputs, world: World, start: Start) -> None:
    """Change what is on the disk as the run's beginning asks for; every rank calls it.

    What dead jobs left is removed, damaged checkpoints that are newer than the one that the run goes on from are set
    aside, and so are the records of a run that left no checkpoint. The configuration is written.

    Raises:
        RunRefused: on every rank, if the folder cannot be written, or a rank does not see it.
    """
    from megarl.checkpoint.agreement import RankFailed, on_every_rank

    run_dir = inputs.config.trainer.run_dir
    try:
        on_every_rank(world, lambda: _take_folder(inputs, start) if world.rank == 0 else None)
        check_seen(os.path.join(run_dir, CONFIG_FILE), world)
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
    for found in start.passed_over:
        place = f"; it is now {set_aside(found.folder)}" if found.damaged else ""
        say(f"skipped {found.folder}: {found.problem}{place}")
    if start.folder is None and trains(inputs.config) and (earlier := set_aside_earlier_run(run_dir)):
        say(f"an earlier run in {run_dir} left no checkpoint; its records are now in {earlier}")
    os.makedirs(run_dir, exist_ok=True)
    rewrite(os.path.join(run_dir, CONFIG_FILE), dump_config(inputs.config).encode(), private=True)


def _candidates(trainer: TrainerConfig) -> list[Found]:
    """Newest first."""
    if trainer.resume_mode == "disable":
        return []
    if trainer.resume_mode == "resume_path":
        folder = trainer.resume_from_path
        check_resumable(folder)
        state = read_state(folder)
        return [Found(folder=folder, position=position_of(state), state=state, problem=None, damaged=False)]
    return checkpoints(trainer.run_dir)


def _start_at(found: Found, inputs: Inputs) -> Start:
    """Raises ValueError if the checkpoint is of another run than `trainer.resume_allow` lets pass."""
    trainer, recorded = inputs.config.trainer, found.state.get("identity", {})
    identity = as_recorded_before(inputs.identity, recorded, inputs) if "data" in recorded else inputs.identity
    # after the warm-up its settings have had their effect
    ignored = {"warmup"} if found.position.loop != "warmup" else set()
    other = differences(recorded, identity, ignore=ignored)
    refused = {part: how for part, how in other.items() if part not in trainer.resume_allow}
    if refused:
        others = "; another ".join(f"{part} ({how})" for part, how in refused.items())
        raise ValueError(
            f"{found.folder} is of a run with another {others}: go on with what it began with, or set "
            f"trainer.resume_allow=[{','.join([*trainer.resume_allow, *refused])}]"
        )
    return Start(folder=found.folder, state=found.state, differs=frozenset(other))


def _damage(inputs: Inputs, folder: str, world: World) -> str | None:
    if not inputs.config.checkpoint.verify:
        return None
    from megarl.checkpoint.store import verify_checkpoint

    return verify_checkpoint(folder, world)


def check_seen(path: str, world: World) -> None:
    """Raises ValueError, on every rank, if a rank does not see a file or folder that rank 0 sees."""
    everyone = world.all_gather((os.path.lexists(path), socket.gethostname()), "all ranks' view of the disk")
    for rank, (seen, host) in enumerate(everyone):
        if not seen:
            raise ValueError(
                f"rank {rank} on {host} does not see {path}: the run's folder must be on a filesystem that all nodes "
                f"share"
            )


def _none_is_whole(trainer: TrainerConfig, passed_over: list[Found]) -> ValueError:
    reasons = "; ".join(f"{os.path.basename(found.folder)}: {found.problem}" for found in passed_over)
    return ValueError(
        f"{trainer.run_dir} has checkpoints, but none is whole ({reasons}): bring one back, or start anew with another "
        f"trainer.default_local_dir"
    )

"""Names checkpoint folders, and reads their small state. Torch-free, so that a bad path is refused at once.

RUN/checkpoints/warmup_step_100/         of the loop "warmup", which comes before every RL step
RUN/checkpoints/global_step_20/          of the loop "rl"; a folder gets its name when everything in it is written
    trainer.json                         loop, step, sampler position, identity of the run, number of ranks
    config.json, tokenizer.json, ...     the model's Hugging Face files without the weights
    carry_over.npz, carry_over.*.npz     with rollout.carry_over: the responses under way, of each replica
    huggingface/                         with hf_model in checkpoint.save_contents: the actor as a Hugging Face folder
    ...                                  Megatron-Core's distributed checkpoint
    manifest.json                        size and checksum of every other file
RUN/checkpoints/best.json                with trainer.best_metric: names the checkpoint with the best validation
RUN/checkpoints/global_step_10.damaged/  a checkpoint that was not whole
RUN/checkpoints/.global_step_30.partial/ an unfinished one
RUN/checkpoints/.global_step_20.replaced/ an earlier global_step_20 while a new one takes its name
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megarl.checkpoint.manifest import (
    checksum_problem,
    one_line,
    read_manifest,
    size_problem,
    sync_folder,
)
from megarl.telemetry.lines import only_file

STATE_FILE = "trainer.json"
LOOP = re.compile(r"[a-z][a-z0-9-]*")
"""Names that a flow may give a loop."""
_NAME = re.compile(rf"({LOOP.pattern})_step_(0|[1-9]\d*)")
_GREATEST = 2**53
"""Of the integers on which JSON's readers agree."""
_TYPES = {"step": int, "order": int, "row": int, "loop": str, "models": list, "identity": dict}
"""Of the values that a run reads out of a small state."""


@dataclass(frozen=True, order=True)
class Position:
    """Marks a place in a run: the last step that is done. Positions are ordered as the run goes.

    Attributes:
        order: number of the loop among the flow's loops, from 0; -1 is before the first.
        step: number of the step in the loop, from 1.
        loop: the loop's name.
    """

    order: int
    step: int
    loop: str

    @property
    def name(self) -> str:
        """Name the folder: `global_step_20` in the loop "rl", `warmup_step_20` in "warmup"."""
        return f"{'global' if self.loop == 'rl' else self.loop}_step_{self.step}"


BEGINNING = Position(-1, 0, "")
"""Of a run that has made no step."""


def loop_and_step(name: str) -> tuple[str, int]:
    """Take a checkpoint's name apart: global_step_20 -> ("rl", 20)."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return "rl" if match[1] == "global" else match[1], int(match[2])


def is_checkpoint_name(name: str) -> bool:
    """Say whether a folder of that name is a checkpoint: neither unfinished nor damaged, nor an export."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Found:
    """Describes a folder with the name of a checkpoint, after the cheap checks.

    Attributes:
        state: its small state; empty if it cannot be read.
        problem: why no run can go on from it, with the name of the file; None if one can.
        damaged: whether it is not whole.
    """

    folder: str
    position: Position
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    problem: str | None
    damaged: bool


def checkpoint_folder(run_dir: str, position: Position) -> str:
    return os.path.join(run_dir, "checkpoints", position.name)


def partial_folder(final: str) -> str:
    """Name the path under which a checkpoint is written until it is whole."""
    return os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.partial")


def checkpoints(run_dir: str) -> list[Found]:
    """List the folders with names of checkpoints, newest first; reads each `trainer.json` once.

    Raises:
        ValueError: RUN/checkpoints is no folder, but a link to a disk that is away, say.
    """
    names = filter(is_checkpoint_name, _everything_in(run_dir))
    candidates = [_look_at(os.path.join(run_dir, "checkpoints", name)) for name in names]
    return sorted(candidates, key=lambda candidate: candidate.position, reverse=True)


def whole_checkpoints(run_dir: str) -> list[str]:
    """List the folders of the run's whole checkpoints, newest first."""
    return [candidate.folder for candidate in checkpoints(run_dir) if candidate.problem is None]


def problem_with(folder: str) -> str | None:
    """Say why a folder cannot be a whole checkpoint, without reading its weights; None if nothing speaks against it."""
    return _state_and_problem(folder)[1]


def check_resumable(folder: str) -> None:
    """Refuse a folder that is not the whole checkpoint of a run. Raises ValueError with what to change."""
    if read_state(folder).get("weights_only"):
        raise ValueError(
            f"'{folder}' holds converted weights and no run to go on from; start one from it with "
            f"actor_rollout_ref.model.checkpoint"
        )
    check_whole(folder)


def check_whole(folder: str) -> None:
    """Refuse a folder that is not a whole checkpoint; reads no weights. Raises ValueError."""
    read_state(folder)
    if problem := problem_with(folder):
        raise ValueError(f"'{folder}' is damaged: {problem}; give another checkpoint")


def read_state(folder: str) -> dict[str, Any]:
    """Read the small state of a checkpoint. Raises ValueError with what to change if the folder is not one."""
    if not os.path.isfile(os.path.join(folder, STATE_FILE)):
        raise ValueError(
            f"'{folder}' is not a checkpoint: it has no {STATE_FILE}; give a complete global_step_N folder"
        )
    try:
        return _read_state(folder)
    except ValueError as e:
        raise ValueError(f"'{folder}' is not a checkpoint: {e}") from e


def position_of(state: dict[str, Any]) -> Position:
    """Find the position of a run's checkpoint in its small state."""
    return Position(state["order"], state["step"], state["loop"])


def write_state(folder: str, state: Mapping[str, Any]) -> None:
    """Write the small state of a checkpoint."""
    with open(os.path.join(folder, STATE_FILE), "w", encoding="utf-8") as f:
        json.dump(dict(state), f)


def set_aside(folder: str) -> str:
    """Rename a damaged checkpoint, so that saving its step again neither deletes it nor finds its name taken.

    Returns:
        its new place: global_step_20.damaged, or .damaged-2 if that is taken.
    """
    places = (f"{folder}.damaged{'' if i == 1 else f'-{i}'}" for i in itertools.count(1))
    place = next(place for place in places if not os.path.lexists(place))
    os.rename(folder, place)
    return place


def take_place(partial: str, final: str) -> None:
    """Give a finished folder its name, and then delete an earlier checkpoint of that name."""
    parent, name = os.path.split(final)
    replaced = os.path.join(parent, f".{name}.replaced")
    if os.path.lexists(final):
        if _look_at(final).problem is not None:  # damaged, or weights that a person converted and put there
            set_aside(final)
        else:
            delete(replaced)
            os.rename(final, replaced)
    try:
        os.rename(partial, final)
    except OSError:
        if os.path.lexists(replaced) and not os.path.lexists(final):
            os.rename(replaced, final)
        raise
    sync_folder(parent)
    delete(replaced)


def bring_back_replaced(run_dir: str) -> None:
    """Rename replaced checkpoints back if their job died before the new one was in place.

    Only one job may use the folder.
    """
    parent = os.path.join(run_dir, "checkpoints")
    for name in _left_in(run_dir, ".replaced"):
        final = os.path.join(parent, os.path.splitext(name)[0][1:])
        if not os.path.lexists(final):
            os.rename(os.path.join(parent, name), final)


def listed_partials(run_dir: str) -> list[tuple[str, str]]:
    """List the unfinished checkpoints that have a manifest, oldest first, each with the path that it is to have."""
    listed = []
    for name in _left_in(run_dir, ".partial"):
        partial, final = (os.path.join(run_dir, "checkpoints", each) for each in (name, os.path.splitext(name)[0][1:]))
        with suppress(ValueError):
            read_manifest(partial)
            listed.append((_read_state(partial)["order"], loop_and_step(os.path.basename(final))[1], partial, final))
    return [(partial, final) for _, _, partial, final in sorted(listed)]


def remove_partials(run_dir: str) -> list[str]:
    """Delete unfinished checkpoints of dead jobs: a full disk would stay full. Only one job may use the folder.

    Returns:
        the names of the deleted folders.
    """
    bring_back_replaced(run_dir)
    names = _left_in(run_dir, ".partial", ".replaced")
    for name in names:
        delete(os.path.join(run_dir, "checkpoints", name))
    return names


def prune_checkpoints(run_dir: str, keep: int | None, just_written: str, best: str | None = None) -> list[str]:
    """Delete all whole checkpoints but the newest `keep`, the one just written and the best one.

    Returns:
        a line for each that cannot be deleted, which is no reason to end the run.
    """
    names_to_keep = {os.path.basename(folder) for folder in (just_written, best or just_written)}
    problems = []
    for folder in whole_checkpoints(run_dir)[keep:] if keep is not None else ():
        if os.path.basename(folder) in names_to_keep:
            continue
        try:
            delete(partial_folder(folder))
            os.rename(folder, partial_folder(folder))  # half of it under its own name would look damaged
            delete(partial_folder(folder))
        except OSError as e:
            problems.append(f"{folder} cannot be deleted: {one_line(e)}")
    return problems


def delete(path: str) -> None:
    """Delete a folder or a file, as far as it can be deleted."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _read_state(folder: str) -> dict[str, Any]:
    """Read the small state. Raises ValueError naming the file."""
    try:
        with open(os.path.join(folder, STATE_FILE), encoding="utf-8", opener=only_file) as f:
            state = json.load(f)
    except FileNotFoundError:
        raise ValueError(f"{STATE_FILE} is missing") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"its {STATE_FILE} is not JSON ({one_line(e)})") from e
    if not isinstance(state, dict) or not _is_well_formed(state):
        raise ValueError(f"its {STATE_FILE} does not record a step of a run")
    return state


def _is_well_formed(state: dict[str, Any]) -> bool:
    """Say whether a state has all values of a run, or the step of converted weights, each with its type."""
    values = {key: value for key, value in state.items() if key in _TYPES}
    numbers = [value for value in values.values() if isinstance(value, int)]
    return (
        ({"step"} if state.get("weights_only") else _TYPES.keys()) <= values.keys()
        and all(type(value) is _TYPES[key] for key, value in values.items())
        and all(abs(number) < _GREATEST for number in numbers)
    )


def _left_in(run_dir: str, *ends: str) -> list[str]:
    """List names such as .global_step_20.partial: a checkpoint's name with one of these ends."""
    parts = [(name, *os.path.splitext(name)) for name in _everything_in(run_dir)]
    return [name for name, stem, end in parts if end in ends and stem[:1] == "." and is_checkpoint_name(stem[1:])]


def _everything_in(run_dir: str) -> list[str]:
    parent = os.path.join(run_dir, "checkpoints")
    if os.path.isdir(parent):
        return sorted(os.listdir(parent))
    if os.path.lexists(parent):
        where = f"a link to {os.readlink(parent)}, which is no folder now" if os.path.islink(parent) else "no folder"
        raise ValueError(f"{parent} is {where}: bring it back, or set another trainer.default_local_dir")
    return []


def _look_at(folder: str) -> Found:
    """Check a folder that has the name of a checkpoint; without a readable position it counts as the newest."""
    state, problem = _state_and_problem(folder)
    loop, step = loop_and_step(os.path.basename(folder))
    damaged = problem is not None
    if not damaged and state.get("weights_only"):
        problem = "it holds converted weights, and no run to go on from"
    elif not damaged and "model" not in state.get("contents", ["model"]):
        problem = "it holds a Hugging Face folder alone (checkpoint.save_contents), and no run to go on from"
    order = state.get("order", _GREATEST)
    position = Position(order, step, state.get("loop", loop))
    return Found(folder=folder, position=position, state=state, problem=problem, damaged=damaged)


def _state_and_problem(folder: str) -> tuple[dict[str, Any], str | None]:
    """Read the small state, which is empty where that fails, and say why the folder is no whole checkpoint."""
    if not os.path.isdir(folder):
        return {}, "it is no folder"
    try:
        state = _read_state(folder)
    except ValueError as e:
        return {}, str(e)
    try:
        records = read_manifest(folder)
    except ValueError as e:
        return state, str(e)
    name = os.path.basename(os.path.abspath(folder))
    if is_checkpoint_name(name) and state["step"] != loop_and_step(name)[1] and not state.get("weights_only"):
        return state, f"its {STATE_FILE} says step {state['step']}, its name step {loop_and_step(name)[1]}"
    # a run is compared with what its checkpoint records: a damaged record would be refused as another run's
    return state, size_problem(folder, records) or checksum_problem(folder, records, records.keys() & {STATE_FILE})

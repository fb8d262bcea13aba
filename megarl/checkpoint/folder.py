"""Names and small state of checkpoint folders. Torch-free, so that a bad path is refused before anything starts.

RUN/checkpoints/warmup_step_100/         of the loop "warmup", which comes before every RL step
RUN/checkpoints/global_step_20/          of the loop "rl"; a folder gets its name when everything in it is written
    trainer.json                         loop, step, sampler position, number of ranks
    config.json, tokenizer.json, ...     the model's Hugging Face files without the weights
    carry_over.npz                       with rollout.carry_over: the responses under way
    huggingface/                         with checkpoint.save_hf: the actor as a Hugging Face folder
    ...                                  Megatron-Core's distributed checkpoint
    manifest.json                        size and checksum of every other file
RUN/checkpoints/best.json                with trainer.best_metric: which checkpoint's validation was best
RUN/checkpoints/global_step_10.damaged/  was found not to be whole
RUN/checkpoints/.global_step_30.partial/ unfinished
RUN/checkpoints/.global_step_20.replaced/ an earlier global_step_20 while a new one takes its name
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.checkpoint.manifest import (
    MANIFEST_FILE,
    checksum_problem,
    one_line,
    read_manifest,
    size_problem,
    sync_folder,
)
from megarl.telemetry.lines import only_file

STATE_FILE = "trainer.json"
_WITHOUT_MANIFEST = ("metadata.json", "common.pt", ".metadata")


LOOP = re.compile(r"[a-z][a-z0-9-]*")
"""What a flow may call a loop."""
_NAME = re.compile(rf"({LOOP.pattern})_step_(0|[1-9]\d*)")
_ORDER = {"warmup": 0, "rl": 1}  # in which checkpoints that do not record it were written
_LAST = 2**31


@dataclass(frozen=True, order=True)
class Position:
    """Where in a run a checkpoint was saved; ordered as the run goes.

    Attributes:
        order: which of the flow's loops it is, from 0; -1 is before the first.
        step: of the loop, from 1.
        loop: its name.
    """

    order: int
    step: int
    loop: str

    @property
    def name(self) -> str:
        """The folder's name: `global_step_20` in the loop "rl", `warmup_step_20` in "warmup"."""
        return f"{'global' if self.loop == 'rl' else self.loop}_step_{self.step}"


BEGINNING = Position(-1, 0, "")
"""Of a run that has made no step."""


def rl_step(step: int) -> Position:
    """Of the loop "rl" in a flow that begins with a supervised warm-up, if only one of no steps."""
    return Position(_ORDER["rl"], step, "rl")


def warmup_step(step: int) -> Position:
    """Of the supervised warm-up."""
    return Position(_ORDER["warmup"], step, "warmup")


def loop_and_step(name: str) -> tuple[str, int]:
    """global_step_20 -> ("rl", 20), for a checkpoint's name."""
    found = _NAME.fullmatch(name)
    assert found is not None
    return "rl" if found[1] == "global" else found[1], int(found[2])


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of that name is a checkpoint, not one that is unfinished or damaged, or an export beside it."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint of a run, or what has the name of one.

    Attributes:
        state: its small state; empty where that cannot be read.
        problem: why no run can go on from it, naming the file; None if nothing is known against it.
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
    """Where a checkpoint is written until it is whole."""
    return os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.partial")


def checkpoints(run_dir: str) -> list[Found]:
    """Everything that is named as a checkpoint of the run, newest first, after the cheap checks of `problem_with`.

    Raises:
        ValueError: RUN/checkpoints is there and is no folder, such as a link to a disk that is away.
    """
    found = [_look_at(os.path.join(run_dir, "checkpoints", name)) for name in _names_in(run_dir)]
    return sorted(found, key=lambda checkpoint: checkpoint.position, reverse=True)


def whole_checkpoints(run_dir: str) -> list[str]:
    """Folders of the run's whole checkpoints, newest first."""
    return [found.folder for found in checkpoints(run_dir) if found.problem is None]


def problem_with(folder: str) -> str | None:
    """Why a folder cannot be a whole checkpoint, without reading its weights; None if nothing speaks against it."""
    return _state_and_problem(folder)[1]


def remark_on(folder: str) -> str | None:
    """What a person should know of a checkpoint that `problem_with` passes."""
    if os.path.exists(os.path.join(folder, MANIFEST_FILE)):
        return None
    return f"'{folder}' was written before checkpoints had a {MANIFEST_FILE}: its contents cannot be checked"


def check_resumable(folder: str) -> None:
    """Raises ValueError with what to change if the folder is not the whole checkpoint of a run."""
    if read_state(folder).get("weights_only"):
        raise ValueError(
            f"'{folder}' holds converted weights and no run to go on from; start one from it with "
            f"actor_rollout_ref.model.checkpoint"
        )
    check_whole(folder)


def check_whole(folder: str) -> None:
    """Raises ValueError if the folder is not a whole checkpoint; reads no weights."""
    read_state(folder)
    if problem := problem_with(folder):
        raise ValueError(f"'{folder}' is damaged: {problem}; give another checkpoint")


def read_state(folder: str) -> dict[str, Any]:
    """The small state of a checkpoint; raises ValueError with what to change if the folder is not one."""
    if not os.path.isfile(os.path.join(folder, STATE_FILE)):
        raise ValueError(
            f"'{folder}' is not a checkpoint: it has no {STATE_FILE}; give a complete global_step_N folder"
        )
    try:
        return _read_state(folder)
    except ValueError as e:
        raise ValueError(f"'{folder}' is not a checkpoint: {e}") from e


def position_of(state: dict[str, Any]) -> Position:
    """Where a checkpoint was saved, from its small state."""
    loop = state.get("loop") or state.get("phase", "rl").lower()  # before flows there were two phases
    return Position(state.get("order", _ORDER.get(loop, _LAST)), state["step"], loop)


def write_state(folder: str, state: dict[str, Any]) -> None:
    """Write the small state of a checkpoint."""
    with open(os.path.join(folder, STATE_FILE), "w", encoding="utf-8") as f:
        json.dump(state, f)


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
    """Give a finished folder its name. A checkpoint that has the name already is deleted afterwards, not before."""
    parent, name = os.path.split(final)
    replaced = os.path.join(parent, f".{name}.replaced")
    if os.path.lexists(final):
        if _look_at(final).problem is not None:  # somebody's converted weights are no earlier try of the run's
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
    """Give a checkpoint its name again whose job died before a new one took it. Only one job may use the folder."""
    parent = os.path.join(run_dir, "checkpoints")
    for name in _left_in(run_dir, ".replaced"):
        final = os.path.join(parent, os.path.splitext(name)[0][1:])
        if not os.path.lexists(final):
            os.rename(os.path.join(parent, name), final)


def remove_partials(run_dir: str) -> list[str]:
    """Delete what jobs left that died while they saved: a full disk would stay full. Only one job may use the folder.

    Returns:
        the names of what was deleted.
    """
    bring_back_replaced(run_dir)
    removed = _left_in(run_dir, ".partial", ".replaced")
    for name in removed:
        delete(os.path.join(run_dir, "checkpoints", name))
    return removed


def prune_checkpoints(run_dir: str, keep: int | None, just_written: str, best: str | None = None) -> list[str]:
    """Delete all but the newest `keep` whole checkpoints; what was just written and the best one stay, however old
    their steps are.

    Returns:
        a line for each that cannot be deleted, which is no reason to end the run.
    """
    stay = {os.path.basename(folder) for folder in (just_written, best or just_written)}
    problems = []
    for folder in whole_checkpoints(run_dir)[keep:] if keep is not None else ():
        if os.path.basename(folder) in stay:
            continue
        try:
            delete(partial_folder(folder))
            os.rename(folder, partial_folder(folder))  # half of it under its own name would look damaged
            delete(partial_folder(folder))
        except OSError as e:
            problems.append(f"{folder} cannot be deleted: {one_line(e)}")
    return problems


def delete(path: str) -> None:
    """Delete a folder or a file; what cannot be deleted stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


_GREATEST = 2**53  # that JSON's readers agree on


def _read_state(folder: str) -> dict[str, Any]:
    """Raises ValueError naming the file."""
    try:
        with open(os.path.join(folder, STATE_FILE), encoding="utf-8", opener=only_file) as f:
            state = json.load(f)
    except FileNotFoundError:
        raise ValueError(f"{STATE_FILE} is missing") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"its {STATE_FILE} is not JSON ({one_line(e)})") from e
    counts = [state.get(key, 0) for key in ("step", "order", "row")] if isinstance(state, dict) else [None]
    if not all(type(count) is int and abs(count) < _GREATEST for count in counts):
        raise ValueError(f"its {STATE_FILE} is not a JSON object with an integer step")
    if "step" not in state or not all(isinstance(state.get(key, ""), str) for key in ("loop", "phase")):
        raise ValueError(f"its {STATE_FILE} is not a JSON object with an integer step")
    return dict(state)


def _names_in(run_dir: str) -> list[str]:
    """Names of checkpoints in the run's folder."""
    return [name for name in _everything_in(run_dir) if is_checkpoint_name(name)]


def _left_in(run_dir: str, *ends: str) -> list[str]:
    """Names of unfinished ones: .global_step_20.partial, of a checkpoint's name."""
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
    """What has the name of a checkpoint; one that does not say which loop it is of counts as the newest."""
    state, problem = _state_and_problem(folder)
    loop, step = loop_and_step(os.path.basename(folder))
    position = replace(position_of(state), step=step) if state else Position(_ORDER.get(loop, _LAST), step, loop)
    damaged = problem is not None
    if not damaged and state.get("weights_only"):
        problem = "it holds converted weights, and no run to go on from"
    return Found(folder=folder, position=position, state=state, problem=problem, damaged=damaged)


def _state_and_problem(folder: str) -> tuple[dict[str, Any], str | None]:
    """The small state, empty where it cannot be read, and why the folder is no whole checkpoint."""
    if not os.path.isdir(folder):
        return {}, "it is no folder"
    try:
        state = _read_state(folder)
    except ValueError as e:
        return {}, str(e)
    return state, _problem_beside(folder, state)


def _problem_beside(folder: str, state: dict[str, Any]) -> str | None:
    """Why a folder with that small state is no whole checkpoint."""
    try:
        records = read_manifest(folder)
    except ValueError as e:
        return str(e)
    name = os.path.basename(os.path.abspath(folder))
    if is_checkpoint_name(name) and state["step"] != loop_and_step(name)[1] and not state.get("weights_only"):
        return f"its {STATE_FILE} says step {state['step']}, its name step {loop_and_step(name)[1]}"
    if records is not None:
        # what the run is compared with must be what was written: it would be refused as another run's
        return size_problem(folder, records) or checksum_problem(folder, records, records.keys() & {STATE_FILE})
    if "format" in state:
        return f"{MANIFEST_FILE} is missing"
    return _problem_without_manifest(folder)


def _problem_without_manifest(folder: str) -> str | None:
    """Of a checkpoint from before manifests."""
    for name in _WITHOUT_MANIFEST:
        file = os.path.join(folder, name)
        if not os.path.isfile(file) or not os.path.getsize(file):
            return f"{name} is missing or empty"
    try:
        with open(os.path.join(folder, "metadata.json"), encoding="utf-8") as f:
            json.load(f)
    except (OSError, ValueError) as e:
        return f"metadata.json is not JSON ({one_line(e)})"
    if not any(name.endswith(".distcp") for name in os.listdir(folder)):
        return "it has no .distcp file"
    return None

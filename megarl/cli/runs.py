"""List the runs below a folder, the latest first, with owner, state, step, last metrics, starts and GPU-hours.

A run is a folder with config.yaml, or with metrics or checkpoints. The files are only read; a running run is not
disturbed. Folders that this user may not read are named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pwd
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from megarl.checkpoint.folder import is_checkpoint_name
from megarl.config.load import CONFIG_FILE, YAML_LOADER, yaml_text
from megarl.evaluation.folder import EVAL_FILE
from megarl.plain import plain
from megarl.telemetry.sinks.jsonl import METRICS_FILE, last_rows
from megarl.trainer.run_lock import LOCK_FILE, holder_of
from megarl.trainer.starts import past_starts, read_parent

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "megarl runs runs"
CHECKPOINTS = "checkpoints"
DEPTH = 4
"""Levels of folders below the given one that are searched."""
LESS = ("model", "flow", "host", "checkpoints", "starts", "changed", "owner", "GPU-hours")
"""Columns that a narrow terminal does not show, in the order in which they are dropped."""
MOST_NAMED = 5
"""Folders that cannot be read and are named; more of them are counted."""
SHOWN = {"reward/mean": "reward", "val/accuracy": "accuracy", "train/loss": "loss", "val/loss": "held-out loss"}


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """Describes a run.

    Attributes:
        state: such as "running on node7 (pid 123)", "finished", "stopped by SIGINT".
        step: step of the last row of the metrics; None: there is no row.
        steps: steps of the whole run; None: unknown.
        metrics: the last values of the metrics in `SHOWN`, by label.
        changed: time of the last write, seconds since 1970.
        checkpoints: number of checkpoints.
        size: bytes of the checkpoints.
        owner: user who owns the folder.
        hosts: of the newest start that is recorded.
        starts: number of recorded starts.
        gpu_hours: GPUs times hours, over all recorded starts; None: there is none on GPUs.
        parent: checkpoint of another run that `megarl branch` began this run from; empty: none.
    """

    folder: str
    flow: str
    model: str
    state: str
    step: int | None
    steps: int | None
    metrics: dict[str, float]
    changed: float
    checkpoints: int
    size: int
    owner: str
    hosts: list[str]
    starts: int
    gpu_hours: float | None
    parent: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl runs`."""
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="default runs")
    parser.add_argument("--json", action="store_true", help="a JSON line per run")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the runs. Raises ValueError if there is no such folder."""
    del rest
    if not os.path.isdir(args.folder):
        raise ValueError(f"no folder at '{args.folder}'")
    unreadable: list[str] = []
    runs = sorted((read_run(folder) for folder in run_folders(args.folder, unreadable)), key=lambda run: -run.changed)
    _name_unreadable(unreadable)
    if args.json:
        for found_run in runs:
            metrics = {label: value if math.isfinite(value) else None for label, value in found_run.metrics.items()}
            print(json.dumps({**vars(found_run), "metrics": metrics}))
        return 0
    if not runs:
        print(f"no runs in {args.folder}")
        return 0
    _print_table(runs, args.folder)
    return 0


def run_folders(folder: str, unreadable: list[str] | None = None, depth: int = DEPTH) -> Iterator[str]:
    """Yield the folders of runs below a folder, or the folder itself. Evaluations are not runs.

    Args:
        unreadable: gets the folders that this user may not read.
    """
    try:
        names = set(os.listdir(folder))
    except OSError as e:
        if unreadable is not None and isinstance(e, PermissionError):
            unreadable.append(folder)
        return
    if EVAL_FILE in names:
        return
    if METRICS_FILE in names or CHECKPOINTS in names or (CONFIG_FILE in names and LOCK_FILE in names):
        yield folder
        return
    for name in sorted(names) if depth else []:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path) and not name.startswith("."):
            yield from run_folders(path, unreadable, depth - 1)


def read_run(folder: str) -> FoundRun:
    """Describe a run from its files."""
    config = _config(os.path.join(folder, CONFIG_FILE))
    holder, running = holder_of(folder)
    trainer, model = _section(config, "trainer"), _section(config, "actor_rollout_ref", "model")
    rows = last_rows(os.path.join(folder, METRICS_FILE))
    step = next((int(x) for row in rows if _is_number(x := row.get("step")) and math.isfinite(x)), None)
    steps = holder.get("steps") or trainer.get("total_training_steps")
    steps = steps if isinstance(steps, int) and abs(steps) < 2**63 else None
    files = [os.path.join(folder, name) for name in (METRICS_FILE, CONFIG_FILE, LOCK_FILE, CHECKPOINTS)]
    count, size = _checkpoints(os.path.join(folder, CHECKPOINTS))
    starts = past_starts(folder, running=running)
    return FoundRun(
        folder=folder,
        flow=str(trainer.get("flow", "")),
        model=_model(model),
        state=_state(holder, running, step, steps),
        step=step,
        steps=steps,
        metrics={label: value for key, label in SHOWN.items() if (value := _last(rows, key)) is not None},
        changed=max(map(_changed, files)),
        checkpoints=count,
        size=size,
        owner=_owner(folder),
        hosts=list(starts[-1].hosts) if starts else [],
        starts=len(starts),
        gpu_hours=sum(start.gpu_hours for start in starts) if any(start.on_gpus for start in starts) else None,
        parent=parent if isinstance(parent := read_parent(folder).get("checkpoint"), str) else "",
    )


def _owner(folder: str) -> str:
    """Name the user who owns a folder; a number where the system has no name for it."""
    try:
        number = os.stat(folder).st_uid
    except OSError:  # it was deleted meanwhile
        return "?"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _name_unreadable(folders: list[str]) -> None:
    if folders:
        named = ", ".join(f"{folder} (of {_owner(folder)})" for folder in folders[:MOST_NAMED])
        more = f" and {len(folders) - MOST_NAMED} more" if len(folders) > MOST_NAMED else ""
        print(f"megarl: you may not read {named}{more}", file=sys.stderr)


def _changed(file: str) -> float:
    try:
        return os.path.getmtime(file)
    except OSError:  # no such file
        return 0.0


def _state(holder: dict[str, Any], running: bool, step: int | None, steps: int | None) -> str:
    if running:
        return f"running on {holder.get('host', '?')} (pid {holder.get('pid', '?')})"
    if isinstance(ended := holder.get("ended"), str):
        return ended
    if steps and step is not None and step >= steps:
        return "finished"
    return "ended without a word" if holder else "not running"


def _model(model: dict[str, Any]) -> str:
    """Name the model's folder, or the checkpoint that the run started from."""
    path = str(model.get("checkpoint") or model.get("path") or "")
    return os.path.basename(os.path.abspath(path)) if path else ""


def _config(file: str) -> dict[str, Any]:
    """Read the YAML of any version without the schema; {} if it cannot be read."""
    import yaml

    try:
        tree = yaml.load(yaml_text(file), Loader=YAML_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _section(config: dict[str, Any], *names: str) -> dict[str, Any]:
    section: Any = config
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _last(rows: list[dict[str, Any]], key: str) -> float | None:
    return next((row[key] for row in rows if _is_number(row.get(key))), None)


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Tell whether a value is a number that a float can hold: JSON's whole numbers have any length."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _checkpoints(folder: str) -> tuple[int, int]:
    """Count the checkpoints, and the bytes of all files in their folder."""
    count = size = 0
    for parent, folders, files in os.walk(folder):
        if parent == folder:
            count = sum(map(is_checkpoint_name, folders))
        for name in files:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # a running run has deleted it
                continue
    return count, size


def _print_table(runs: list[FoundRun], folder: str) -> None:
    from megarl.telemetry.console import Output
    from megarl.telemetry.progress import print_table

    cells = [_cells(found_run, folder) for found_run in runs]
    table = _table(cells, folder, [])
    for n in range(1, len(LESS) + 1):
        terminal = Output()
        if not terminal.is_terminal or Output(width=1000).measure(table).maximum <= terminal.width:
            break
        table = _table(cells, folder, LESS[:n])
    print_table(table)


def _table(rows: list[dict[str, str]], folder: str, without: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"Runs in {folder}"), title_justify="left")
    columns = [column for column in rows[0] if column not in without]
    for column in columns:
        table.add_column(column, no_wrap=column == "step", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table


def _cells(run: FoundRun, folder: str) -> dict[str, str]:
    from megarl.estimate.budget_table import size
    from megarl.telemetry.progress import duration

    steps = "?" if run.steps is None else run.steps
    cells = {
        "run": os.path.relpath(run.folder, folder) if run.folder != folder else run.folder,
        "flow": run.flow,
        "model": run.model,
        "state": run.state if len(run.state) <= 60 else f"{run.state[:59]}…",
        "step": "-" if run.step is None else f"{run.step}/{steps}",
        "last metrics": ", ".join(f"{label} {value:.4g}" for label, value in run.metrics.items()),
        "changed": f"{duration(max(0.0, time.time() - run.changed))} ago",
        "checkpoints": f"{run.checkpoints}, {size(run.size)}" if run.checkpoints else "-",
        "owner": run.owner,
        "host": f"{run.hosts[0]}{f' + {len(run.hosts) - 1}' if len(run.hosts) > 1 else ''}" if run.hosts else "-",
        "starts": str(run.starts or "-"),
        "GPU-hours": "-" if run.gpu_hours is None else f"{run.gpu_hours:,.1f}",
    }
    return {column: plain(text) for column, text in cells.items()}  # before the width of a column is measured

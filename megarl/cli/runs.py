"""List the runs below a folder, the latest first: what they are, how far they are, and what they gave.

A run is a folder with config.yaml, or with metrics or checkpoints. Nothing is changed, and a running one not disturbed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from megarl.checkpoint.folder import is_checkpoint_name
from megarl.config.load import CONFIG_FILE, YAML_LOADER, yaml_text
from megarl.evaluation.folder import EVAL_FILE
from megarl.plain import plain
from megarl.telemetry.sinks.jsonl import METRICS_FILE
from megarl.trainer.run_lock import LOCK_FILE, holder_of

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "megarl runs runs"
CHECKPOINTS = "checkpoints"
DEPTH = 4
"""Folders below the given one that are looked into."""
TAIL = 256 * 2**10
"""Bytes at the end of a metric file in which the last value of a metric is looked for."""
LESS = ("model", "flow", "checkpoints", "changed")
"""Columns that a narrow terminal does not show, the first to go first."""
SHOWN = {"reward/mean": "reward", "val/accuracy": "accuracy", "train/loss": "loss", "val/loss": "held-out loss"}


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run.

    Attributes:
        state: such as "running on node7 (pid 123)", "finished", "stopped by SIGINT".
        step: of the last row of the metrics; None: there is none.
        steps: of the whole run; None: unknown.
        metrics: the last value of some, by the name that people read.
        changed: when something was written last, seconds since 1970.
        checkpoints: how many there are.
        size: bytes of the checkpoints.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `megarl runs`."""
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="default runs")
    parser.add_argument("--json", action="store_true", help="a JSON line per run")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Raises ValueError if there is no such folder."""
    del rest
    if not os.path.isdir(args.folder):
        raise ValueError(f"no folder at '{args.folder}'")
    found = sorted((read_run(folder) for folder in run_folders(args.folder)), key=lambda run: -run.changed)
    if args.json:
        for one in found:
            metrics = {label: value if math.isfinite(value) else None for label, value in one.metrics.items()}
            print(json.dumps({**vars(one), "metrics": metrics}))
        return 0
    if not found:
        print(f"no runs in {args.folder}")
        return 0
    _print_table(found, args.folder)
    return 0


def run_folders(folder: str, depth: int = DEPTH) -> Iterator[str]:
    """Folders of runs in a folder, or the folder itself; evaluations in them are no runs."""
    try:
        names = set(os.listdir(folder))
    except OSError:  # of somebody else
        return
    if EVAL_FILE in names:
        return
    if METRICS_FILE in names or CHECKPOINTS in names or (CONFIG_FILE in names and LOCK_FILE in names):
        yield folder
        return
    for name in sorted(names) if depth else []:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path) and not name.startswith("."):
            yield from run_folders(path, depth - 1)


def read_run(folder: str) -> FoundRun:
    """What can be known of a run from its files."""
    config = _config(os.path.join(folder, CONFIG_FILE))
    try:
        holder, held = holder_of(folder)
    except RecursionError:  # it holds brackets in brackets
        holder, held = {}, False
    trainer, model = _section(config, "trainer"), _section(config, "actor_rollout_ref", "model")
    rows = _last_rows(os.path.join(folder, METRICS_FILE))
    step = next((int(x) for row in rows if _is_number(x := row.get("step")) and math.isfinite(x)), None)
    steps = holder.get("steps") or trainer.get("total_training_steps")
    steps = steps if isinstance(steps, int) and abs(steps) < 2**63 else None
    files = [os.path.join(folder, name) for name in (METRICS_FILE, CONFIG_FILE, LOCK_FILE, CHECKPOINTS)]
    count, size = _checkpoints(os.path.join(folder, CHECKPOINTS))
    return FoundRun(
        folder=folder,
        flow=str(trainer.get("flow", "")),
        model=_model(model),
        state=_state(holder, held, step, steps),
        step=step,
        steps=steps,
        metrics={label: value for key, label in SHOWN.items() if (value := _last(rows, key)) is not None},
        changed=max(map(_changed, files)),
        checkpoints=count,
        size=size,
    )


def _changed(file: str) -> float:
    try:
        return os.path.getmtime(file)
    except OSError:  # it is not there
        return 0.0


def _state(holder: dict[str, Any], held: bool, step: int | None, steps: int | None) -> str:
    if held:
        return f"running on {holder.get('host', '?')} (pid {holder.get('pid', '?')})"
    if isinstance(ended := holder.get("ended"), str):
        return ended
    if steps and step is not None and step >= steps:
        return "finished"
    return "ended without a word" if holder else "not running"


def _model(model: dict[str, Any]) -> str:
    """The checkpoint's run, or the model's folder."""
    path = str(model.get("checkpoint") or model.get("path") or "")
    return os.path.basename(os.path.abspath(path)) if path else ""


def _config(file: str) -> dict[str, Any]:
    """The YAML as it is, whatever version wrote it; empty if it cannot be read."""
    import yaml

    try:
        tree = yaml.load(yaml_text(file), Loader=YAML_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _section(config: dict[str, Any], *names: str) -> dict[str, Any]:
    at: Any = config
    for name in names:
        at = at.get(name) if isinstance(at, dict) else None
    return at if isinstance(at, dict) else {}


def _last_rows(file: str) -> list[dict[str, Any]]:
    """Of the end of a metric file, the newest first; a line that is being written is left out."""
    if not os.path.isfile(file):  # a pipe would not end
        return []
    try:
        with open(file, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL))
            lines = f.read(TAIL).splitlines()
    except OSError:
        return []
    rows = []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _last(rows: list[dict[str, Any]], key: str) -> float | None:
    return next((row[key] for row in rows if _is_number(row.get(key))), None)


def _is_number(value: Any) -> TypeGuard[int | float]:
    """One that a float can hold: JSON's whole numbers have any length."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _checkpoints(folder: str) -> tuple[int, int]:
    """How many there are, and the bytes of all files there."""
    count = size = 0
    for parent, folders, files in os.walk(folder):
        if parent == folder:
            count = sum(map(is_checkpoint_name, folders))
        for name in files:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # a run prunes meanwhile
                continue
    return count, size


def _print_table(found: list[FoundRun], folder: str) -> None:
    from megarl.telemetry.console import Output
    from megarl.telemetry.progress import print_table

    cells = [_cells(one, folder) for one in found]
    table = _table(cells, folder, [])
    for n in range(1, len(LESS) + 1):
        terminal = Output()
        if not terminal.is_terminal or terminal.measure(table).maximum <= terminal.width:
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


def _cells(one: FoundRun, folder: str) -> dict[str, str]:
    from megarl.estimate.budget_table import size
    from megarl.telemetry.progress import duration

    of = "?" if one.steps is None else one.steps
    cells = {
        "run": os.path.relpath(one.folder, folder) if one.folder != folder else one.folder,
        "flow": one.flow,
        "model": one.model,
        "state": one.state if len(one.state) <= 60 else f"{one.state[:59]}…",
        "step": "-" if one.step is None else f"{one.step}/{of}",
        "last metrics": ", ".join(f"{label} {value:.4g}" for label, value in one.metrics.items()),
        "changed": f"{duration(max(0.0, time.time() - one.changed))} ago",
        "checkpoints": f"{one.checkpoints}, {size(one.size)}" if one.checkpoints else "-",
    }
    return {column: plain(text) for column, text in cells.items()}  # before a column's width is measured

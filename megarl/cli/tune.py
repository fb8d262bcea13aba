"""Search for settings of a run with Optuna: each trial is a run of `megarl train`, pruned while it trains.

SWEEP is a YAML file with the keys config, folder, metric, mode, trials, keys, sampler and pruner. The same command,
started several times, on this machine or as the tasks of a Slurm array, works on the same search. Started again after
a kill it goes on: trials that have lost their worker are tried again, from their checkpoint if they left one.

The folder holds each trial's run, the study, which `optuna-dashboard FOLDER/journal.log` shows, and best.yaml, the
run's configuration with the best values. Needs `pip install optuna`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from megarl.cli.words import add_overrides
from megarl.config import dump_config, load_config
from megarl.config.load import check_nothing_hidden
from megarl.plain import plain
from megarl.telemetry.lines import rewrite
from megarl.telemetry.progress import print_table
from megarl.tuning.sweep import SET_FOR_TRIALS, Sweep, overrides, read_sweep

if TYPE_CHECKING:
    from megarl.tuning.study import Trials

EXAMPLE = "megarl tune examples/tune/sweep.yaml --trials 8"
BEST = "best.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl tune`."""
    parser.add_argument("sweep", metavar="SWEEP", help="YAML file of the search")
    add_overrides(parser)
    parser.add_argument("--trials", type=int, help="runs in all, with those that there are; default the file's")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Play trials; returns 0 once there are enough, 1 if runs fail one after the other or all have, 128 + s after
    signal s.

    Raises:
        ValueError: the search cannot work, in one line.
    """
    words = [*args.overrides, *rest]
    sweep = read_sweep(args.sweep)
    most = sweep.trials if args.trials is None else args.trials
    if most < 1:
        raise ValueError(f"--trials {most} must be 1 or more")
    _check_runs(sweep, words)
    if importlib.util.find_spec("optuna") is None:
        raise ValueError("megarl tune needs Optuna: pip install optuna")
    try:
        return _search(sweep, most, words)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise ValueError(f"the search in {sweep.folder} stopped: {e}; mend that, and the same command goes on") from e


def _search(sweep: Sweep, most: int, words: Sequence[str]) -> int:
    """See `run`."""
    from megarl.tuning.study import Trials
    from megarl.tuning.worker import SweepFailed, SweepStopped, Worker

    trials = Trials(sweep)
    try:
        Worker(sweep, trials, words, lambda line: print(plain(line), flush=True)).play_all(most)
    except SweepStopped as e:
        print(f"megarl: {e}: stopped; the same command goes on", file=sys.stderr)
        return 128 + e.signal
    except SweepFailed as e:
        print(f"megarl: {plain(str(e))}", file=sys.stderr)
        _show(sweep, trials, words)
        return 1
    if trials.all_have_failed():
        print(f"megarl: all trials have failed: {sweep.folder}/trial_*.log say why", file=sys.stderr)
        return 1
    _show(sweep, trials, words)
    return 0


def _check_runs(sweep: Sweep, words: Sequence[str]) -> None:
    """Raise ValueError if a value of the search is refused, before anything starts."""
    for key in SET_FOR_TRIALS:
        if key in sweep.keys or any(word.partition("=")[0] == key for word in words):
            raise ValueError(f"the search sets {key} for each trial: leave it out; trials are in the sweep's folder")
    for key, value in sweep.extremes():
        config = load_config(sweep.config, [*words, *overrides({key: value})])
        check_nothing_hidden(config)
    if config.trainer.nnodes > 1:
        raise ValueError("a trial is a run on one machine; set trainer.nnodes=1")
    if "jsonl" not in config.trainer.logger:
        raise ValueError("a search reads metrics.jsonl; add jsonl to trainer.logger")


def _show(sweep: Sweep, trials: Trials, words: Sequence[str]) -> None:
    """Print the trials as a table, and write the best one's configuration."""
    finished = trials.finished()
    if not finished:
        print("no trial has a result yet")
        return
    keys = list(dict.fromkeys([*sweep.keys, *(key for trial in finished for key in trial.params)]))
    table = Table(title=Text(f"{sweep.metric}, {sweep.mode}"))
    for column in ("trial", "state", sweep.metric, *keys):
        table.add_column(Text(column))
    for trial in finished:
        values = [trial.value, *(trial.params.get(key, "") for key in keys)]
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        table.add_row(str(trial.number), trial.state.name.lower(), *map(Text, cells))
    print_table(table)
    best = finished[0]
    config = load_config(sweep.config, [*words, *overrides(best.params)])
    file = os.path.join(sweep.folder, BEST)
    rewrite(file, dump_config(config).encode(), private=True)
    print(f"best: trial {best.number}, {trials.folder(best)}; megarl train {shlex.quote(file)} trains with its values")

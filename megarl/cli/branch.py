"""Make the folder of a new run that begins from a checkpoint of another run, with changed settings.

The checkpoint's files are linked, or copied where they cannot be, so the first run may delete its own. The new run's
metrics begin with the first run's rows up to the checkpoint. The command that trains on is printed.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from megarl.checkpoint.folder import Found, check_whole, checkpoints, delete, partial_folder
from megarl.cli.words import add_overrides
from megarl.config import Config, dump_config, load_config
from megarl.config.load import CONFIG_FILE, check_nothing_hidden
from megarl.config.secrets import hidden_values
from megarl.telemetry.lines import complete_lines, write_new
from megarl.telemetry.sinks.jsonl import METRICS_FILE, read_row
from megarl.trainer.starts import PARENT_FILE

EXAMPLE = "megarl branch runs/math/a --at 800 trainer.experiment_name=b actor_rollout_ref.actor.optim.lr=5e-7"
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl branch`."""
    parser.add_argument("run", metavar="RUN", help="the first run's folder")
    parser.add_argument("--at", metavar="STEP", help="step, or checkpoint such as warmup_step_100; default the newest")
    add_overrides(parser)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Make the new run's folder, and print how to train on.

    Raises:
        ValueError: there is no such checkpoint, the new folder is in use, or a setting cannot change; nothing is made.
    """
    overrides = [*args.overrides, *rest]
    checkpoint = _checkpoint(args.run, args.at)
    record = os.path.join(args.run, CONFIG_FILE)
    begins = ["trainer.resume_mode=auto", "trainer.resume_from_path=", *overrides]
    config = load_config(record, begins)
    check_nothing_hidden(config)
    if config.trainer.resume_mode != "auto" or config.trainer.resume_from_path:
        raise ValueError("the new run goes on from its own checkpoint: leave trainer.resume_mode and resume_from_path")
    target = config.trainer.run_dir
    _check_target(target, args.run)
    nothing_to_do = _check_settings(record, [*begins, f"trainer.resume_from_path={checkpoint.folder}"])
    _fill(target, checkpoint, config, args.run, overrides)
    ranks = f"--nproc {config.trainer.n_gpus_per_node} " if config.trainer.nnodes == 1 else ""
    secrets = "".join(f" {key}=..." for key in hidden_values(config.model_dump()))
    print(f"{target} begins from {checkpoint.folder}; train on with")
    print(f"megarl train {ranks}{shlex.quote(os.path.join(target, CONFIG_FILE))}{secrets}")
    if nothing_to_do is not None:
        print(f"megarl: {nothing_to_do}", file=sys.stderr)
    return 0


def _checkpoint(run_dir: str, at: str | None) -> Found:
    """Find a checkpoint by its step or name. Raises ValueError naming those that are there."""
    if not os.path.isdir(run_dir):
        raise ValueError(f"no run folder at '{run_dir}'")
    candidates = checkpoints(run_dir)
    whole = [candidate for candidate in candidates if candidate.problem is None]
    matches = whole if at is None else [c for c in candidates if at in (str(c.position.step), c.position.name)]
    if not matches:
        names = ", ".join(candidate.position.name for candidate in reversed(whole)) or "none"
        raise ValueError(f"{run_dir} has no checkpoint{'' if at is None else f' {at!r}'}; whole ones there: {names}")
    if (problem := matches[0].problem) is not None:
        raise ValueError(f"no run can begin from {matches[0].folder}: {problem}")
    return matches[0]


def _check_target(target: str, run_dir: str) -> None:
    if os.path.realpath(target) == os.path.realpath(run_dir):
        raise ValueError(
            f"the new run needs a folder other than {run_dir}: add trainer.experiment_name=NAME or "
            f"trainer.default_local_dir=FOLDER"
        )
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise ValueError(f"'{target}' holds something already, and nothing is overwritten: name a new folder")


def _check_settings(record: str, overrides: Sequence[str]) -> str | None:
    """Refuse settings that no run can have, or that may not change; returns `finished`. Raises ValueError."""
    from megarl.trainer.admission.checks import check_run
    from megarl.trainer.resuming.resume import expected_start, finished

    inputs = check_run(load_config(record, [*overrides, "trainer.resume_mode=resume_path"]))
    return finished(inputs, expected_start(inputs))


def _fill(target: str, checkpoint: Found, config: Config, run_dir: str, overrides: Sequence[str]) -> None:
    """Make the folder. Its checkpoint gets its name last, when everything else is there.

    Of two commands that fill one folder, the second finds its `checkpoints` there, and is refused. What others put into
    the folder meanwhile stays, whatever happens.
    """
    place = os.path.join(target, "checkpoints", os.path.basename(checkpoint.folder))
    partial = partial_folder(place)
    parent = {"checkpoint": os.path.abspath(checkpoint.folder), "changed": [_key(word) for word in overrides]}
    try:
        with ExitStack() as undo:
            if not os.path.isdir(target):
                os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
                os.mkdir(target, mode=0o700)
                undo.callback(_remove_empty, target)
            os.mkdir(os.path.dirname(place))
            undo.callback(_remove_empty, os.path.dirname(place))
            undo.callback(delete, partial)
            shutil.copytree(checkpoint.folder, partial, copy_function=_link)
            check_whole(partial)
            texts = {
                METRICS_FILE: _rows_until(checkpoint, run_dir),
                CONFIG_FILE: dump_config(config).encode(),
                PARENT_FILE: json.dumps(parent).encode(),
            }
            for name, text in texts.items():
                write_new(os.path.join(target, name), text, private=name == CONFIG_FILE)
                undo.callback(delete, os.path.join(target, name))
            os.rename(partial, place)
            undo.pop_all()
    except (OSError, ValueError) as e:  # shutil.Error is an OSError: the first run deletes the checkpoint just now
        raise ValueError(f"{target} cannot be made from {checkpoint.folder}: {' '.join(str(e).split())[:300]}") from e


def _rows_until(checkpoint: Found, run_dir: str) -> bytes:
    """Read the rows of the run's metrics up to a checkpoint's."""
    lines = complete_lines(os.path.join(run_dir, METRICS_FILE))
    last = checkpoint.state["row"]
    return b"".join(line for line in lines if (row := read_row(line)) is not None and row["step"] <= last)


def _remove_empty(folder: str) -> None:
    with suppress(OSError):  # others have put something there
        os.rmdir(folder)


def _key(word: str) -> str:
    return word.partition("=")[0]


def _link(source: str, place: str) -> str:
    """Link a file, or copy it where links cannot be: on another disk, of another user's file."""
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError as e:
        if e.errno not in _NO_LINK:
            raise
        shutil.copy2(source, place)
    return place

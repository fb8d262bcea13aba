"""Compare two models over the same prompts with the same seeds, prompt by prompt.

A and B are paths that `megarl eval` takes, or folders of finished evaluations. Data, reward, sampling and layout are
the same for both: those of CONFIG, or else of a finished evaluation, or else of A's run, or else of B's run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megarl.cli.evaluate import Request, add_options, check, config_of, fill, request_of
from megarl.cli.words import add_best
from megarl.config.load import CONFIG_FILE
from megarl.evaluation.comparison import compare_sources, differing_settings, pair, table, write_comparison
from megarl.evaluation.folder import (
    Finished,
    check_unused,
    is_finished,
    new_folder,
    read_evaluation,
    remove_unused,
)
from megarl.telemetry.progress import print_table
from megarl.trainer.subject import Subject, find_subject

EXAMPLE = "megarl compare runs/math/run/checkpoints/global_step_20 runs/math/run --out compared"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl compare`."""
    for name in ("a", "b"):
        parser.add_argument(name, help="a path that megarl eval takes, or the folder of a finished evaluation")
    add_best(parser)
    add_options(parser, "default: A-vs-B next to A; -2, -3 ... if used")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """See `compare`."""
    return compare(args.a, args.b, request_of(args, rest))


def compare(a: str, b: str, request: Request) -> int:
    """Compare two models; returns 0, or the exit code of the evaluation that failed.

    Raises:
        ValueError: the comparison cannot work, in one line.
    """
    sides = [_side(path, request.best) for path in (a, b)]
    file = request.file or _shared_config(sides)
    unfinished = [side for side in sides if isinstance(side, Subject)]
    if not unfinished:
        if request.file or request.overrides or request.nproc:
            raise ValueError("both are evaluations already: nothing is generated, and no configuration is read")
        pair(*_both(sides))  # refuse before a folder is made
    if request.out is not None:
        check_unused(request.out)
    pins = {subject.path: check(subject, file, request) for subject in unfinished}
    if len(unfinished) == 2 and file and not request.file:
        print(f"megarl: both answer with the settings in {file}", file=sys.stderr)
    folder = new_folder(request.out or _place(sides), exact=request.out is not None)
    for i, side in enumerate(sides):
        if isinstance(side, Subject):
            side_folder = new_folder(os.path.join(folder, "ab"[i]), exact=True)
            if code := fill(side_folder, config_of(side, file, request, side_folder, pins[side.path])):
                remove_unused(folder)  # keeps a finished first side
                return code
            sides[i] = read_evaluation(side_folder)
    first, second = _both(sides)
    prompts = pair(first, second)
    for difference in differing_settings(first, second):
        print(f"megarl: warning: A and B differ in more than the model: {difference}", file=sys.stderr)
    comparisons = compare_sources(prompts)
    write_comparison(folder, first, second, prompts, comparisons)
    print_table(table(comparisons, f"A = {a}   B = {b}"))
    print(f"compare.json and changes.jsonl are in {folder}")
    return 0


def _side(path: str, best: bool) -> Subject | Finished:
    return read_evaluation(path) if is_finished(path) else find_subject(path, best=best)


def _both(sides: list[Subject | Finished]) -> tuple[Finished, Finished]:
    a, b = sides
    assert isinstance(a, Finished) and isinstance(b, Finished)
    return a, b


def _shared_config(sides: list[Subject | Finished]) -> str | None:
    """Choose the configuration of both sides: a finished evaluation's, so that the other side is asked the same."""
    finished = [os.path.join(side.folder, CONFIG_FILE) for side in sides if isinstance(side, Finished)]
    recorded = [side.recorded for side in sides if isinstance(side, Subject) and side.recorded]
    return next((file for file in (*finished, *recorded) if os.path.isfile(file)), None)


def _place(sides: list[Subject | Finished]) -> str:
    """Name the default folder: RUN/eval/global_step_4-vs-global_step_2."""
    first = sides[0]
    neighbour = first.place if isinstance(first, Subject) else os.path.abspath(first.folder)
    return os.path.join(os.path.dirname(neighbour), "-vs-".join(side.name for side in sides))

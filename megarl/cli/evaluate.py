"""Have held-out prompts answered, and score the responses.

PATH is a checkpoint (global_step_N), a run's folder, or a Hugging Face folder. Data, reward, sampling and layout come
from CONFIG, or else from the run that PATH lies in, and from key=value. What is written goes beside the path, into a
new folder each time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.cli.words import add_words, split_words
from megarl.config import Config, dump_config
from megarl.config.load import check_nothing_hidden
from megarl.config.secrets import hand_over
from megarl.evaluation.folder import CONFIG_FILE, check_unused, is_finished, new_folder, remove_unused
from megarl.processes import module_command
from megarl.telemetry.lines import rewrite
from megarl.trainer.subject import Subject, evaluation_config, find_subject
from megarl.trainer.trust import check_trusted

EXAMPLE = "megarl eval runs/math/run --best actor_rollout_ref.rollout.val_kwargs.n=8"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for.

    Attributes:
        file: the configuration file; None: the run's own.
        out: the folder to fill; None: one beside the path.
        trust: run the code that a run's own configuration names.
    """

    file: str | None
    overrides: Sequence[str]
    out: str | None
    nproc: int | None
    best: bool
    trust: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `megarl eval`."""
    parser.add_argument("path", help="checkpoint (global_step_N), run folder (its newest one), or Hugging Face folder")
    add_options(parser, "default: eval/NAME in the run's folder, or NAME.eval beside the path; -2, -3 ... if used")


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Those of `megarl eval` and `megarl compare`."""
    add_words(parser)
    parser.add_argument("--out", help=f"folder to write to, which must be new or empty; {out}")
    parser.add_argument("--nproc", type=int, help="ranks to start; default trainer.n_gpus_per_node")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the run's own configuration names, of rewards, say"
    )
    parser.add_argument("--best", action="store_true", help="of a run the checkpoint that its best.json names")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """See `evaluate`."""
    return evaluate(args.path, request_of(args, rest))


def request_of(args: argparse.Namespace, after_options: Sequence[str]) -> Request:
    """Raises ValueError for a word that is neither a file nor key=value."""
    file, words = split_words([*args.words, *after_options])
    if args.nproc is not None and args.nproc < 1:
        raise ValueError(f"--nproc {args.nproc} must be 1 or more")
    return Request(file=file, overrides=words, out=args.out, nproc=args.nproc, best=args.best, trust=args.trust)


def evaluate(path: str, request: Request) -> int:
    """Exit code of the ranks, 0 when the evaluation is written.

    Raises:
        ValueError: it cannot work, in one line.
    """
    if is_finished(path):
        raise ValueError(f"'{path}' is an evaluation already; give the checkpoint, or `megarl compare` two of them")
    subject = find_subject(path, best=request.best)
    file = request.file or subject.recorded
    if request.out is not None:
        check_unused(request.out)
    check(subject, file, request)
    folder = new_folder(request.out or subject.place, exact=request.out is not None)
    return fill(folder, config_of(subject, file, request, folder))


def config_of(subject: Subject, file: str | None, request: Request, folder: str) -> Config:
    """See `evaluation_config`."""
    return evaluation_config(subject, file, request.overrides, folder, request.nproc)


def check(subject: Subject, file: str | None, request: Request) -> None:
    """Raises ValueError, before a folder is made, if the evaluation cannot work."""
    from megarl.trainer.admission.checks import check_run  # imports torch: a misspelt key is refused sooner

    config = config_of(subject, file, request, request.out or f"{subject.place}/new")
    check_nothing_hidden(config)
    if request.file is None and not request.trust and file is not None:
        check_trusted(config, os.path.dirname(file), request.overrides)
    check_run(config)


def fill(folder: str, config: Config) -> int:
    """Start the ranks of an evaluation; returns their exit code. A folder that they leave empty is removed."""
    from megarl.launcher import launch
    from megarl.nodes import Node

    file = os.path.join(folder, CONFIG_FILE)
    rewrite(file, dump_config(config).encode(), private=True)
    hand_over(config.model_dump(), os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core's order of kernels needs it
    command = [*module_command("megarl.train"), file]
    node = Node(nproc=config.trainer.n_gpus_per_node)
    try:
        return launch(command, node, timeout_minutes=config.trainer.timeout_minutes)
    finally:
        remove_unused(folder)

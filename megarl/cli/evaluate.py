"""Generate responses to held-out prompts, and score them.

PATH is a checkpoint (global_step_N), a run's folder, a Hugging Face folder, or a model of its Hub. Data, reward,
sampling and layout come from CONFIG, or else from the run that PATH lies in, and from key=value. Each evaluation writes
into a new folder next to PATH, or in the working directory for a model of the Hub.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.cli.words import add_checkpoint, add_words, split_words
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
    """Holds the parsed command line of an evaluation.

    Attributes:
        file: the configuration file; None: the run's own.
        out: the folder to fill; None: a new one next to the path.
        trust: run the code that a run's own configuration names.
    """

    file: str | None
    overrides: Sequence[str]
    out: str | None
    nproc: int | None
    best: bool
    trust: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl eval`."""
    add_checkpoint(parser)
    add_options(parser, "default: eval/NAME in the run's folder, or NAME.eval next to the path; -2, -3 ... if used")


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options that `megarl eval` and `megarl compare` share."""
    add_words(parser)
    parser.add_argument("--out", help=f"folder to write to, which must be new or empty; {out}")
    parser.add_argument("--nproc", type=int, help="ranks to start; default trainer.n_gpus_per_node")
    parser.add_argument(
        "--trust", action="store_true", help="run code that the run's own configuration names, such as rewards"
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """See `evaluate`."""
    return evaluate(args.path, request_of(args, rest))


def request_of(args: argparse.Namespace, after_options: Sequence[str]) -> Request:
    """Read the command line. Raises ValueError for a word that is neither a file nor key=value."""
    file, words = split_words([*args.words, *after_options])
    if args.nproc is not None and args.nproc < 1:
        raise ValueError(f"--nproc {args.nproc} must be 1 or more")
    return Request(file=file, overrides=words, out=args.out, nproc=args.nproc, best=args.best, trust=args.trust)


def evaluate(path: str, request: Request) -> int:
    """Evaluate a model; returns the exit code of the ranks, 0 when the evaluation is written.

    Raises:
        ValueError: the evaluation cannot work, in one line.
    """
    if is_finished(path):
        raise ValueError(f"'{path}' is an evaluation already; give the checkpoint, or `megarl compare` two of them")
    subject = find_subject(path, best=request.best)
    file = request.file or subject.recorded
    if request.out is not None:
        check_unused(request.out)
    pins = check(subject, file, request)
    folder = new_folder(request.out or subject.place, exact=request.out is not None)
    return fill(folder, config_of(subject, file, request, folder, pins))


def config_of(subject: Subject, file: str | None, request: Request, folder: str, pins: Sequence[str] = ()) -> Config:
    """Resolve the configuration of an evaluation, see `evaluation_config`.

    Args:
        pins: what `check` returned.
    """
    return evaluation_config(subject, file, [*request.overrides, *pins], folder, request.nproc)


def check(subject: Subject, file: str | None, request: Request) -> list[str]:
    """Raise ValueError if the evaluation cannot work. Makes no folder; returns `pinned_keys`."""
    from megarl.trainer.admission.checks import check_run  # imports torch: a misspelt key is refused sooner
    from megarl.trainer.hub_models import pinned_keys

    config = config_of(subject, file, request, request.out or f"{subject.place}/new")
    check_nothing_hidden(config)
    if request.file is None and not request.trust and file is not None:
        check_trusted(config, os.path.dirname(file), request.overrides)
    return pinned_keys(check_run(config).config)


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

"""Compare a model as MegaRL reads it with the same model in transformers.

  check FOLDER [--layers N] [--random-init] [--dtype bfloat16]

FOLDER is a Hugging Face folder, or a model of its Hub. On one rank, and without a launcher, `check` compares

  tensors     names and shapes: the files', those that the model's family expects, and transformers'
  log-probs   of a few random sequences; where they differ, what comes out of each layer, and names the first
  gradients   of each weight, for the mean cross-entropy
  native      greedy answers of the built-in engine with transformers', and with the training model's numbers
  vllm        the same, where vLLM is installed and takes the model

in float32: log-probabilities may differ by 1e-4, gradients by a thousandth of their norm. --dtype bfloat16 allows four
times what rounding does to transformers, on average, and other answers. The exit code is 1 if something differs.

--random-init draws the weights; config.json alone is enough. --layers N takes the first layers up to the N-th of each
kind, of a 70B one or two, with the weights that are there or random ones. Names and shapes are those of all layers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.checkpoint.hub_download import Wanted, local_folder
from megarl.checkpoint.huggingface_folder import INDEX, SINGLE, refuse_remote_code
from megarl.models.families import read_architecture
from megarl.telemetry.console import Output, plain_console

if TYPE_CHECKING:
    from megarl.parity.result import Result

EXAMPLE = "megarl model check models/Qwen2.5-72B --layers 1 --random-init"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl model`."""
    ways = parser.add_subparsers(dest="way", required=True, metavar="check")
    check = ways.add_parser("check", help="compare with transformers")
    check.add_argument("folder", metavar="FOLDER", help="Hugging Face folder, or model of the Hub")
    check.add_argument("--layers", type=int, metavar="N", help="take the first N layers of each kind; default all")
    check.add_argument("--random-init", action="store_true", help="random weights; config.json alone is enough")
    check.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of MegaRL's weights (default float32)"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Compare a folder; returns 1 if something differs. Raises ValueError, in one line, if nothing can be compared."""
    del rest
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers {args.layers} must be 1 or more")
    folder = local_folder(args.folder, Wanted.CONFIG if args.random_init else Wanted.WEIGHTS)
    if not os.path.isdir(folder):
        raise ValueError(f"no folder at '{args.folder}', which is no name of a model of the Hub (owner/name) either")
    refuse_remote_code(folder)
    has_weights = any(os.path.isfile(os.path.join(folder, name)) for name in (SINGLE, INDEX))
    if not has_weights and not args.random_init:
        raise ValueError(f"'{folder}' has no weights: neither {SINGLE} nor {INDEX}; --random-init draws some")
    console, differing = plain_console(), list[str]()
    for result in _results(args, folder, console, has_weights=has_weights):
        console.print(f"{result.name:<11}{result.state:<9}{result.compared:<25}{result.finding}".rstrip())
        for line in result.details:
            console.print(f"{'':<11}{line}")
        differing += [result.name] if result.state == "DIFFERS" else []
    verdict = f"differs in {', '.join(differing)}" if differing else "is the same"
    console.print(f"{args.folder} {verdict} in MegaRL and in transformers")
    return 1 if differing else 0


def _results(args: argparse.Namespace, folder: str, console: Output, *, has_weights: bool) -> Iterator[Result]:
    """Compare the tensors of all layers, and the numbers of those that --layers leaves, unless tensors differ."""
    from megarl.estimate.job import parameter_count
    from megarl.parity.compare import compare_numbers
    from megarl.parity.cut import cut_to, first_layers, folder_to_compare
    from megarl.parity.room import check_room
    from megarl.parity.tensors import compare_tensors

    arch = read_architecture(folder)
    count = arch.num_layers if args.layers is None else first_layers(arch, args.layers)
    small, copies = cut_to(arch, count), count < arch.num_layers or args.random_init
    memory = check_room(small, copies=copies, dtype=args.dtype)
    console.print(
        f"{arch.family}: {count} of {arch.num_layers} layers, {parameter_count(small):,} parameters, {args.dtype}"
        f"{', random weights' if args.random_init else ''}: about {memory / 1e9:.3g} GB of memory"
    )
    tensors = compare_tensors(folder, arch, has_weights=has_weights and not args.random_init)
    yield tensors
    if tensors.state != "DIFFERS":
        with folder_to_compare(folder, arch, count=count, random_init=args.random_init) as compared:
            yield from compare_numbers(compared, small, dtype=args.dtype)

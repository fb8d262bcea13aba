"""Convert checkpoints between Hugging Face folders and Megatron-Core `dist_checkpointing` folders.

  hf-to-megatron SRC DST [--tp N --pp N]   SRC: a Hugging Face folder, or a model of its Hub
  megatron-to-hf SRC DST [--best]

The Megatron folder has the format of MegaRL's checkpoints: DST can be the key `actor_rollout_ref.model.checkpoint`, SRC
a global_step_N, or a run's folder, whose newest checkpoint is taken; or Megatron-LM's iter_N, or the folder with its
newest one, with --model for config.json and tokenizer. A job reads the folder in any layout; --tp and
--pp set how it is divided into files, so that each rank of that layout reads only its own part. One process converts,
without a GPU. It needs two to three times the memory of the largest parameter, however large the model is.

First a checkpoint's files are compared with its manifest. Weights that are not finite are refused.

An export is read with `transformers` before it gets its name: its tokenizer must encode some texts to the same ids as
in training, and the model, in float32, must give the checkpoint's greedy answers. The answers are compared if the
weights take less than --answers-below and less than the free memory; one model at a time is in memory.

--verify reads the result back and compares every weight with the source's, bit for bit; --verify=logits also runs both
models, MegaRL's and that of `transformers`, in float32 on a few sequences; each must fit into memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megarl.checkpoint.hub_download import Wanted, local_folder
from megarl.checkpoint.huggingface_folder import CONFIG
from megarl.checkpoint.megatron_lm import is_megatron_lm
from megarl.cli.words import add_best
from megarl.telemetry.console import Output
from megarl.trainer.subject import weights_of

EXAMPLE = "megarl convert megatron-to-hf runs/math/run/checkpoints/global_step_20 exported --verify"
SHARD_BYTES = 5 * 10**9
ANSWERS_BELOW = 8.0
"""GB of float32 weights below which an export's answers are compared."""
M_MMAP_THRESHOLD = -3  # of malloc.h


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl convert`."""
    ways = parser.add_subparsers(dest="way", required=True, metavar="hf-to-megatron | megatron-to-hf")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("source", metavar="SRC", help="folder to read")
    common.add_argument("target", metavar="DST", help="folder to make; it must not be there yet")
    common.add_argument(
        "--max-shard-bytes", default=SHARD_BYTES, type=int, help="about the size of a file (default 5e9)"
    )
    common.add_argument(
        "--verify", nargs="?", const="weights", choices=["weights", "logits"], help="read the result back and compare"
    )
    into = ways.add_parser("hf-to-megatron", parents=[common], help="import")
    into.add_argument("--tp", default=1, type=int, help="tensor-parallel size to cut the checkpoint for (default 1)")
    into.add_argument("--pp", default=1, type=int, help="pipeline-parallel size to cut it for (default 1)")
    into.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="data type of the weights; default one that changes no weight"
    )
    out = ways.add_parser("megatron-to-hf", parents=[common], help="export")
    add_best(out)
    out.add_argument("--no-check", action="store_true", help="do not compare SRC's files with its manifest first")
    out.add_argument(
        "--answers-below",
        metavar="GB",
        default=ANSWERS_BELOW,
        type=float,
        help="compare greedy answers with transformers' if the weights take less in float32 (default "
        f"{ANSWERS_BELOW:g}; 0: never)",
    )
    out.add_argument(
        "--model", help="folder, or model of the Hub, with config.json and tokenizer; default SRC, which has them"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Convert a folder. Raises ValueError, in one line, if it cannot be converted."""
    del rest
    for name in ("tp", "pp", "max_shard_bytes"):  # 0 ranks would give a folder without weights
        if (number := getattr(args, name, 1)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {number} must be 1 or more")
    hide_gpus()
    return_freed_memory()
    args.name = os.path.basename(os.path.abspath(args.source))
    if args.way == "megatron-to-hf":
        args.source = weights_of(args.source, best=args.best)
        if is_megatron_lm(args.source) and not (args.model or os.path.isfile(os.path.join(args.source, CONFIG))):
            raise ValueError(
                f"'{args.source}' is Megatron-LM's: name a folder with config.json and tokenizer in --model"
            )
        args.model = local_folder(args.model, Wanted.TOKENIZER) if args.model else None
    else:
        args.source = local_folder(args.source, Wanted.WEIGHTS)
    try:
        convert(args)
        if args.verify:
            verify(args)
    except (ValueError, OSError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ValueError(reason.removeprefix("actor_rollout_ref.model.path: ")) from e
    return 0


def hide_gpus() -> None:
    """Keep to the CPU, before torch is imported: routers of Megatron-Core move to a GPU that they see."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def return_freed_memory() -> None:
    """Let glibc return freed memory: it keeps freed blocks of up to 32 MiB, the parameters of several layers."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)


def convert(args: argparse.Namespace) -> None:
    import torch

    from megarl.checkpoint.convert import huggingface_to_megatron, megatron_to_huggingface

    with progress(f"{args.way} {args.name}") as advance:
        if args.way == "hf-to-megatron":
            remarks = huggingface_to_megatron(
                args.source,
                args.target,
                tp=args.tp,
                pp=args.pp,
                dtype=getattr(torch, args.dtype) if args.dtype else None,
                max_file_bytes=args.max_shard_bytes,
                advance=advance,
            )
        else:
            remarks = megatron_to_huggingface(
                args.source,
                args.target,
                model_files=args.model or args.source,
                max_shard_bytes=args.max_shard_bytes,
                check=not args.no_check,
                answers_below=args.answers_below,
                advance=advance,
            )
    print(f"wrote {args.target} from {args.source}")
    for remark in remarks:
        print(remark)


def verify(args: argparse.Namespace) -> None:
    from megarl.checkpoint.verify import compare_logits, compare_weights
    from megarl.models.families import read_architecture

    pair = (args.source, args.target) if args.way == "hf-to-megatron" else (args.target, args.source)
    arch = read_architecture(pair[0])
    print(f"verified: {compare_weights(*pair, arch)} weights are the same bits")
    if args.verify == "logits":
        print(f"verified: log-probabilities agree with transformers to {compare_logits(*pair, arch):.1e}")


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; yields a function of (elements converted, elements in all)."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Output(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

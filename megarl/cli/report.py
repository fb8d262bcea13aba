"""Make one page of what runs wrote into their folders. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress

from megarl.report.blocks import Blocks
from megarl.report.page import page
from megarl.report.runs import runs_at
from megarl.telemetry.lines import no_link

DEFAULT_PORT = 6007
EXAMPLE = "megarl report runs/math/a runs/math/b --out report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--out", metavar="FILE", help="default report.html in the folder of one run, or here of several"
    )
    target.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=DEFAULT_PORT,
        metavar="PORT",
        help=f"follow the runs on 127.0.0.1 instead, at the address that it prints; default {DEFAULT_PORT}, 0 any",
    )


def run(args: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Write the page, or serve it until Ctrl-C; returns the exit code.

    Raises:
        ValueError: a folder holds no run with metrics, or the file cannot be written, or the port is taken.
    """
    assert not rest
    if args.serve is not None:
        from megarl.report.serve import serve  # imports an HTTP server, which takes half a second

        serve(runs_at(args.runs, may_be_empty=True), args.serve)
        return 0
    runs = runs_at(args.runs)
    out = args.out or os.path.join(runs[0].folder if len(runs) == 1 else ".", "report.html")
    try:
        text = page(Blocks(runs).refresh()).encode()
    except OSError as e:
        raise ValueError(f"'{e.filename}' cannot be read ({e.strerror or e})") from e
    try:
        _write(out, text)
    except OSError as e:
        raise ValueError(f"'{out}' cannot be written ({e.strerror or e}); give --out another file") from e
    print(f"{out} ({len(text) / 2**20:.1f} MiB, {len(runs)} run{'s' if len(runs) > 1 else ''})")
    return 0


def _write(out: str, text: bytes) -> None:
    """Write a file that gets its name when it is whole. Two processes that write it at once do not mix."""
    if os.path.lexists(out) and (os.path.islink(out) or not os.path.isfile(out)):
        raise OSError("a link, pipe, device or folder has that name")
    partial = f"{out}.{os.getpid()}.partial"
    try:
        with open(partial, "wb", opener=no_link) as f:
            f.write(text)
        os.replace(partial, out)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise

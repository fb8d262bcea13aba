"""Translates another program's configuration into MegaRL's keys: `megarl config migrate FILE ... [key=value ...]`.

The YAML goes to stdout, or to --out; a report on every key goes to stderr. Exit code 0 if all keys are carried or
translated, 1 if some are refused (the YAML is written all the same), 2 if there is nothing to migrate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.config import build_config
from megarl.config.describe import yaml_value
from megarl.migration import Change, Migrated, convert, hydra, read_written
from megarl.migration.entry import Kind
from megarl.migration.tables import TABLES
from megarl.telemetry.lines import write_new
from megarl.telemetry.sinks import SINKS

TITLES: dict[Kind, str] = {
    "carried": "carried as they are",
    "translated": "translated",
    "refused": "refused: these wishes are not met",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl config migrate`."""
    parser.set_defaults(any_options=True)
    parser.add_argument("--from", dest="source", choices=list(TABLES), default="verl", help="whose configuration")
    parser.add_argument("--out", help="the YAML file to write, which must be new; default stdout")
    parser.add_argument("--quiet", action="store_true", help="report refused keys only")
    parser.add_argument(
        "written",
        nargs="+",
        metavar="FILE | key=value",
        help="YAML files, shell scripts and overrides, as they start a run, later ones count; TRL's and OpenRLHF's "
        "may be the words of a command, and TRL's a Python file",
    )


def migrate(args: argparse.Namespace, after_options: Sequence[str] = ()) -> int:
    """Write the configuration and the report; returns the exit code.

    Args:
        args: the parsed arguments of `add_arguments`.
        after_options: words that argparse leaves over because they follow an option.

    Raises:
        ValueError: an unreadable file, or nothing that sets a key.
    """
    words = [*args.written, *after_options]
    if args.source == "verl" and (unknown := [word for word in after_options if _is_no_option(word)]):
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}")
    written = read_written(words, args.source)
    migrated = convert(written, args.source, loggers=SINKS.names())
    build_config(migrated.tree)
    text = "# Made by megarl config migrate\n" + OmegaConf.to_yaml(OmegaConf.create(migrated.tree))
    if args.out:
        try:
            write_new(args.out, text.encode())
        except FileExistsError as e:
            raise ValueError(f"--out '{args.out}' is there already, and nothing is overwritten: name a new file") from e
        except OSError as e:
            raise ValueError(f"--out '{args.out}' cannot be written: {e.strerror or e}") from e
    else:
        sys.stdout.write(text)
    for line in [*report(migrated, args.source, quiet=args.quiet), *written.remarks]:
        print(line, file=sys.stderr)
    return 1 if migrated.of("refused") else 0


def _is_no_option(word: str) -> bool:
    return word.startswith("-") and word.partition("=")[0] not in hydra.OPTIONS


def report(migrated: Migrated, source: str, *, quiet: bool = False) -> list[str]:
    """Write a line for every setting: carried, translated or refused."""
    count = len(migrated.changes)
    lines = [f"{source}: {count} settings: " + ", ".join(f"{len(migrated.of(kind))} {kind}" for kind in TITLES)]
    for kind, title in TITLES.items():
        changes = migrated.of(kind)
        if not changes or (quiet and kind != "refused"):
            continue
        lines.append(f"{title}:")
        lines += [f"  {_line(change)}" for change in changes]
    if migrated.added and not quiet:
        lines.append(f"set beside them, since {source} has or needs these:")
        lines += [f"  {_values(change)}  ({change.why})" for change in migrated.added]
    return lines


def _line(change: Change) -> str:
    if change.kind == "carried":
        return _values(change) or f"{_shown(change.key)}: {change.why}"
    new = _values(change) or ("nothing to set" if change.kind == "translated" else "left out")
    return f"{_shown(change.key)}={_shown(change.value)} -> {new}: {change.why}"


def _values(change: Change) -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in change.values.items())


def _shown(value: Any) -> str:
    text = " ".join(yaml_value(value).split())
    return text if len(text) <= 120 else f"{text[:120]}..."

"""Print, explain and compare configurations.

print CONFIG [key=value ...]   the resolved configuration, every key written out
explain KEY                    type, default, unit and meaning of a key, or the keys of a section
diff A [B]                     what differs between two files or run folders; one alone: from the defaults
keys                           a table of all keys
migrate FILE [key=value ...]   a verl, TRL or OpenRLHF configuration in these keys; also `megarl config --migrate`
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from megarl.cli import migrate
from megarl.cli.words import add_config, keys
from megarl.config import Config, ConfigError, dump_config, load_config
from megarl.config.describe import Described, describe_all, flat, sections
from megarl.config.load import CONFIG_FILE, nearest_key
from megarl.config.secrets import for_records

EXAMPLE = "megarl config explain actor_rollout_ref.actor.clip_ratio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `megarl config`."""
    what = parser.add_subparsers(dest="what", required=True, metavar="print | explain | diff | keys | migrate")
    add_config(what.add_parser("print", help="the resolved configuration"))
    explaining: Any = what.add_parser("explain", help="a key or a section").add_argument("key", metavar="KEY")
    explaining.completer = lambda prefix, **_: [word.removesuffix("=") for word in keys(prefix)]
    diff = what.add_parser("diff", help="what differs")
    diff.add_argument("a", metavar="A", help="YAML file or run folder")
    diff.add_argument("b", metavar="B", nargs="?", help="the same; default: the defaults")
    listing = what.add_parser("keys", help="a table of all keys")
    listing.add_argument("prefix", nargs="?", default="", help="of this section alone")
    migrate.add_arguments(what.add_parser("migrate", help="another program's configuration in these keys"))


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Raises ValueError, in one line, for what is no configuration or no key."""
    if args.what == "migrate":
        return migrate.migrate(args, rest)
    if rest and args.what != "print":
        raise ValueError(f"'{rest[0]}' is one word too many for `megarl config {args.what}`")
    if args.what == "print":
        sys.stdout.write(dump_config(load_config(args.config, [*args.overrides, *rest])))
    elif args.what == "explain":
        print(explain(args.key))
    elif args.what == "diff":
        for line in differences(_read(args.a), _read(args.b) if args.b else Config()):
            print(line)
    else:
        _print_keys(args.prefix)
    return 0


def explain(key: str) -> str:
    """All about a key, or the keys of a section.

    Raises:
        ConfigError: it is neither; the nearest one is named.
    """
    key = key.partition("=")[0].rstrip(".")
    described = {one.key: one for one in describe_all()}
    if key in described:
        return _explained(described[key])
    if key in (known := sections()):
        own = [one for one in described.values() if one.key.startswith(f"{key}.")]
        width = max(len(one.key) for one in own)
        return "\n".join([f"{key}: {known[key]}", "", *(f"  {one.key:<{width}}  {_short(one)}" for one in own)])
    near = nearest_key(key)
    raise ConfigError(f"unknown key '{key}'" + (f"; did you mean '{near}'?" if near else "; see `megarl config keys`"))


def differences(a: Config, b: Config) -> list[str]:
    """`key: value in A | value in B`, for the keys whose values differ."""
    known = {one.key for one in describe_all()}
    left, right = (flat(for_records(one.model_dump()), known) for one in (a, b))
    return [f"{key}: {_shown(left[key])} | {_shown(right[key])}" for key in left if left[key] != right[key]]


def _read(path: str) -> Config:
    if os.path.isdir(path):
        file = os.path.join(path, CONFIG_FILE)
        if not os.path.isfile(file):
            raise ValueError(f"'{path}' is no run's folder: it has no {CONFIG_FILE}")
        path = file
    return load_config(path)


def _explained(one: Described) -> str:
    section = one.key.rpartition(".")[0]
    lines = [
        one.key,
        f"  {one.text}" if one.text else "",
        f"  type     {one.kind}",
        f"  default  {_shown(one.default)}",
    ]
    lines.append(f"  section  {section}: {one.section}")
    return "\n".join(line for line in lines if line)


def _short(one: Described) -> str:
    return f"{one.text} " * bool(one.text) + f"({one.kind}; default {_shown(one.default)})"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else str(value)


def _print_keys(prefix: str) -> None:
    from rich.table import Table

    from megarl.telemetry.progress import print_table

    table = Table(title="Configuration keys", title_justify="left")
    for column in ("key", "type", "default", "meaning"):
        table.add_column(column, no_wrap=column == "key")
    chosen = [one for one in describe_all() if one.key.startswith(prefix)]
    if not chosen:
        explain(prefix)  # says what is near
    for one in chosen:
        table.add_row(one.key, one.kind, _shown(one.default), one.text)
    print_table(table)

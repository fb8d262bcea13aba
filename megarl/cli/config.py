"""Print, explain and compare configurations.

print CONFIG [key=value ...]   the resolved configuration, every key written out
explain KEY                    type, default, unit and meaning of a key, or all keys of a section
diff A [B]                     keys that differ between two files or run folders; default B: the defaults
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
from megarl.config.describe import Described, describe_all, flat, sections, yaml_value
from megarl.config.load import CONFIG_FILE, nearest_key
from megarl.config.secrets import for_records

EXAMPLE = "megarl config explain actor_rollout_ref.actor.clip_ratio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl config`."""
    subcommands = parser.add_subparsers(dest="what", required=True, metavar="print | explain | diff | keys | migrate")
    add_config(subcommands.add_parser("print", help="the resolved configuration"))
    key: Any = subcommands.add_parser("explain", help="a key or a section").add_argument("key", metavar="KEY")
    key.completer = lambda prefix, **_: [word.removesuffix("=") for word in keys(prefix)]
    diff = subcommands.add_parser("diff", help="the keys that differ")
    diff.add_argument("a", metavar="A", help="YAML file or run folder")
    diff.add_argument("b", metavar="B", nargs="?", help="the same; default: the defaults")
    listing = subcommands.add_parser("keys", help="a table of all keys")
    listing.add_argument("prefix", nargs="?", default="", help="only the keys of this section")
    migrate.add_arguments(subcommands.add_parser("migrate", help="another program's configuration in these keys"))


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Run a subcommand. Raises ValueError, in one line, for a wrong configuration or key."""
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
    """Describe a key, or list the keys of a section.

    Raises:
        ConfigError: there is no such key or section; the message names the nearest one.
    """
    key = key.partition("=")[0].rstrip(".")
    descriptions = {description.key: description for description in describe_all()}
    if key in descriptions:
        return _explained(descriptions[key])
    if key in (section_texts := sections()):
        members = [description for name, description in descriptions.items() if name.startswith(f"{key}.")]
        width = max(len(member.key) for member in members)
        lines = [f"  {member.key:<{width}}  {_short(member)}" for member in members]
        return "\n".join([f"{key}: {section_texts[key]}", "", *lines])
    near = nearest_key(key)
    raise ConfigError(f"unknown key '{key}'" + (f"; did you mean '{near}'?" if near else "; see `megarl config keys`"))


def differences(a: Config, b: Config) -> list[str]:
    """Write `key: value in A | value in B` for each key whose values differ."""
    names = {description.key for description in describe_all()}
    values_a, values_b = (flat(for_records(config.model_dump()), names) for config in (a, b))
    keys_that_differ = [key for key in values_a if values_a[key] != values_b[key]]
    return [f"{key}: {_shown(values_a[key])} | {_shown(values_b[key])}" for key in keys_that_differ]


def _read(path: str) -> Config:
    if os.path.isdir(path):
        file = os.path.join(path, CONFIG_FILE)
        if not os.path.isfile(file):
            raise ValueError(f"'{path}' is no run's folder: it has no {CONFIG_FILE}")
        path = file
    return load_config(path)


def _explained(description: Described) -> str:
    lines = [
        description.key,
        f"  {description.text}" if description.text else "",
        f"  type     {description.kind}",
        f"  default  {_shown(description.default)}",
        f"  section  {description.key.rpartition('.')[0]}: {description.section}",
    ]
    return "\n".join(line for line in lines if line)


def _short(description: Described) -> str:
    text = f"{description.text} " * bool(description.text)
    return f"{text}({description.kind}; default {_shown(description.default)})"


def _shown(value: Any) -> str:
    return yaml_value(value) or "''"


def _print_keys(prefix: str) -> None:
    from rich.table import Table

    from megarl.telemetry.progress import print_table

    table = Table(title="Configuration keys", title_justify="left")
    for column in ("key", "type", "default", "meaning"):
        table.add_column(column, no_wrap=column == "key")
    descriptions = [description for description in describe_all() if description.key.startswith(prefix)]
    if not descriptions:
        explain(prefix)  # raises and names the nearest key
    for description in descriptions:
        table.add_row(description.key, description.kind, _shown(description.default), description.text)
    print_table(table)

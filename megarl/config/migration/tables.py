"""The tables, by the program that they are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.migration import trl, verl, verl_models, verl_policy, verl_rollout, verl_run
from megarl.config.migration.entry import Entry, Settings


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is known of a program's configuration.

    Attributes:
        entries: the first that matches a key is its own.
        defaults: the program's, of keys that rules look at.
        complete: keys here -> (value, why) that the other program has by default, or that must be set with others.
    """

    entries: Sequence[Entry]
    defaults: Mapping[str, Any]
    complete: Callable[[Settings, Mapping[str, Any]], Mapping[str, tuple[Any, str]]]


TABLES: Mapping[str, Table] = {
    "verl": Table(
        entries=(*verl_run.ENTRIES, *verl_policy.ENTRIES, *verl_rollout.ENTRIES, *verl_models.ENTRIES),
        defaults=verl.DEFAULTS,
        complete=verl.complete,
    ),
    "trl": Table(entries=trl.ENTRIES, defaults=trl.DEFAULTS, complete=trl.complete),
}


def entries(source: str = "verl") -> list[Entry]:
    """Every key, or pattern of keys, with its kind, what it becomes and why."""
    return list(TABLES[source].entries)


def entry_of(key: str, source: str = "verl") -> Entry | None:
    """The entry of a key."""
    return next((entry for entry in TABLES[source].entries if entry.matches(key)), None)

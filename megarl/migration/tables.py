"""Holds the table of each program whose configurations MegaRL reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megarl.migration import (
    openrlhf,
    openrlhf_names,
    openrlhf_rules,
    trl,
    trl_batch,
    trl_rules,
    verl,
    verl_names,
    verl_rules,
    verl_sft,
)
from megarl.migration.entry import Entry, Settings
from megarl.migration.listed import listed, read


@dataclass(frozen=True, kw_only=True)
class Table:
    """Describes a program's configuration.

    Attributes:
        entries: the first that matches a key counts.
        defaults: the program's defaults of keys that rules read.
        complete: lists MegaRL keys -> (value, why) to set for the program's defaults, or with other keys.
        canonical: the name that the entries have for a key.
        usual: the program's defaults, which ask for nothing, by patterns of keys.
    """

    entries: Sequence[Entry]
    defaults: Mapping[str, Any]
    complete: Callable[[Settings, Mapping[str, Any]], Mapping[str, tuple[Any, str]]]
    canonical: Callable[[str], str] = lambda key: key
    usual: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def is_usual(self, key: str, value: Any) -> bool:
        """Say whether the value is a default of the program that `usual` lists."""
        of_patterns = (values for pattern, values in self.usual.items() if fnmatchcase(key, pattern))
        return any(
            type(value) is type(usual_value) and value == usual_value
            for values in of_patterns
            for usual_value in values
        )


def _complete_verl(settings: Settings, result: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    return (verl_sft if verl.is_sft(settings) else verl).complete(settings, result)


TABLES: Mapping[str, Table] = {
    "verl": Table(
        entries=listed("verl", verl_rules),
        defaults=verl.DEFAULTS,
        complete=_complete_verl,
        canonical=verl_names.canonical,
        usual=read("verl_usual"),
    ),
    "trl": Table(entries=listed("trl", trl_rules), defaults=trl_batch.DEFAULTS, complete=trl.complete),
    "openrlhf": Table(
        entries=listed("openrlhf", openrlhf_rules),
        defaults=openrlhf.DEFAULTS,
        complete=openrlhf.complete,
        canonical=openrlhf_names.canonical,
        usual=openrlhf.USUAL,
    ),
}


def entries(source: str = "verl") -> list[Entry]:
    """List every key, or pattern of keys, with its kind, what it becomes and why."""
    return list(TABLES[source].entries)


def entry_of(key: str, source: str = "verl") -> Entry | None:
    """Find the entry of a key by any of its names."""
    name = TABLES[source].canonical(key)
    return next((entry for entry in TABLES[source].entries if entry.matches(name)), None)

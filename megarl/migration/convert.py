"""Converts another program's settings to a `Config` that loads, and says what became of each setting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from megarl.config.load import all_keys, nearest_key
from megarl.config.schema import Config
from megarl.migration.entry import Computed, Kind, Made, Settings, asks_for
from megarl.migration.tables import TABLES, entry_of

LOGGERS = ("console", "jsonl", "csv", "tensorboard")
"""The loggers that come with every installation."""

_LONGEST = 300
"""Letters of a key, at most, in which its sections are sought."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Says what became of one setting.

    Attributes:
        key, value: as the user wrote them; the key is empty for a default of the other program.
        values: keys here with their values.
    """

    key: str
    value: Any
    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """Holds a migrated configuration.

    Attributes:
        tree: nested values, which `build_config` accepts.
        changes: one for each setting, in the order in which the user wrote them.
        added: defaults of the other program that MegaRL does not have.
    """

    tree: dict[str, Any]
    changes: tuple[Change, ...]
    added: tuple[Change, ...]

    def of(self, kind: Kind) -> list[Change]:
        return [change for change in self.changes if change.kind == kind]


def convert(values: Mapping[str, Any], source: str = "verl", *, loggers: Sequence[str] = LOGGERS) -> Migrated:
    """Carry, translate or refuse every setting of another program.

    Args:
        values: that program's settings, by dotted key.
        source: its name: "verl", "trl" or "openrlhf".
        loggers: names that `trainer.logger` knows.
    """
    table = TABLES[source]
    settings = Settings(values, table.defaults, loggers, table.canonical)
    changes = [_change(key, value, settings, source) for key, value in values.items()]
    result: dict[str, Any] = {}
    for change in changes:
        result |= change.values
    changes = [_in_force(change, changes, result) for change in changes]
    wrong = _impossible(result)  # a value of the wrong type, say: what is left loads
    added = {key: pair for key, pair in table.complete(settings, result).items() if key not in result}
    result |= {key: value for key, (value, _) in added.items()}
    wrong += _impossible(result)
    if result.get("trainer.test_freq", -1) > 0 and not result.get("data.val_files"):
        freq = result.pop("trainer.test_freq")
        wrong.append(("trainer.test_freq", f"name held-out rows in data.val_files, and set trainer.test_freq={freq}"))
    for key, why in wrong:
        changes = [_without(change, key, why) for change in changes]
    changes = [_excused(change, settings, source) for change in changes]
    added = {key: (value, why + _instead(key, changes, source)) for key, (value, why) in added.items() if key in result}
    tree = _tree(result)
    more = [Change(key="", value=None, kind="translated", values={k: v}, why=why) for k, (v, why) in added.items()]
    return Migrated(tree=tree, changes=tuple(changes), added=tuple(more))


def _instead(key: str, changes: Sequence[Change], source: str) -> str:
    """Name the refused setting in whose place a default stands; empty without one."""
    refused_keys = [
        item.key
        for item in changes
        if item.kind == "refused" and (entry := entry_of(item.key, source)) and key in re.split(r", | or ", entry.to)
    ]
    return f"; {refused_keys[0]} is refused" if refused_keys else ""


def _change(written: str, value: Any, settings: Settings, source: str) -> Change:
    entry, key = entry_of(written, source), TABLES[source].canonical(written)
    if isinstance(value, Computed) and (entry is None or entry.to):
        result = Made(kind="refused", why=f"it is computed: say what it comes to, {written}=...")
    elif entry is not None:
        try:
            result = entry.rule(key, value, settings)
        except Exception as e:  # a rule expects values that its program takes
            result = Made(kind="refused", why=f"its value is none that {source} takes ({type(e).__name__})")
    elif source == "verl" and key in set(all_keys()):
        result = Made(kind="carried", values={key: value})
    else:
        near = nearest_key(written) if source == "verl" else None
        instead = f"set {near}, if it means that" if near else "set what it stands for"
        result = Made(kind="refused", why=f"{source}'s key is not known here; leave it out, or {instead}")
    return Change(key=written, value=value, kind=result.kind, values=result.values, why=result.why)


def _excused(change: Change, settings: Settings, source: str) -> Change:
    """Accept a refused setting that is empty, a part of what is off, or the other program's default."""
    if change.kind != "refused" or change.values or isinstance(change.value, Computed):
        return change
    table, key = TABLES[source], TABLES[source].canonical(change.key)
    sections = [key[:at] for at, letter in enumerate(key[:_LONGEST]) if letter == "."]
    off = next((key for key in sections if any(settings.of(f"{key}.{x}") is False for x in ("enable", "enabled"))), "")
    unknown = entry_of(change.key, source) is None
    if change.value in (None, "", [], {}) or (unknown and not asks_for(change.value)):
        why = "asks for nothing"
    elif off:
        why = f"a part of {off}, which is off"
    elif table.is_usual(key, change.value):
        why = f"{source}'s default, for which nothing need be set"
    else:
        return change
    return replace(change, kind="translated", why=why)


def _in_force(change: Change, changes: Sequence[Change], result: Mapping[str, Any]) -> Change:
    """Give a change the values that count: a later setting may have replaced its own."""
    values = {key: result[key] for key in change.values}
    conflict = next((key for key in values if values[key] != change.values[key]), None)
    if conflict is None:
        return change
    last = [other.key for other in changes if conflict in other.values][-1]
    kind: Kind = "translated" if change.kind == "carried" else change.kind
    return replace(change, kind=kind, values=values, why=f"{change.why}; {last} counts".removeprefix("; "))


def _without(change: Change, key: str, why: str) -> Change:
    if key not in change.values:
        return change
    rest = {name: value for name, value in change.values.items() if name != key}
    return Change(key=change.key, value=change.value, kind="refused", values=rest, why=f"{key}: {why}")


def _impossible(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Remove from `result` the keys whose values a `Config` refuses; list them with its messages."""
    problems: list[tuple[str, str]] = []
    while True:
        try:
            Config.model_validate(_tree(result))
            return problems
        except ValidationError as e:
            first = e.errors()[0]
        at = [str(part) for part in first["loc"]]
        wrong = next((key for n in range(len(at), 0, -1) if (key := ".".join(at[:n])) in result), None)
        wrong = wrong or next(key for key in result if key.startswith(".".join(at)))
        message = first["msg"]
        problems.append((wrong, f"{message[0].lower()}{message[1:]}"))
        del result[wrong]


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in sorted(values, key=_place):
        *parents, leaf = key.split(".")
        at = tree
        for name in parents:
            at = at.setdefault(name, {})
        at[leaf] = values[key]
    return tree


def _place(key: str) -> tuple[int, ...]:
    """Order sections as the schema does; the keys of a section keep their order."""
    sections = list(Config.model_fields)
    section = key.split(".")[0]
    return (sections.index(section) if section in sections else len(sections),)

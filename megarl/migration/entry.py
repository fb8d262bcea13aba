"""Describes what becomes of one key of another program's configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.registry import Registry

Kind = Literal["carried", "translated", "refused"]
NOTHING: tuple[Any, ...] = (None, False, "", 0, 0.0, -1, [], {})
"""Values that ask for nothing."""


def asks_for(value: Any, nothing: Sequence[Any] = NOTHING) -> bool:
    """Say whether a value is none of those in `nothing`; 0 and False differ."""
    return not any(value is empty or (type(value) is type(empty) and value == empty) for empty in nothing)


class Computed(str):
    """Marks an expression whose value the other program works out as it runs."""


class Settings(Mapping[str, Any]):
    """Holds the other program's values by dotted key, in the order in which the user wrote them.

    Attributes:
        loggers: names that `trainer.logger` knows.
        written: the keys as the user wrote them; an older key may have another name by now.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        loggers: Sequence[str] = (),
        canonical: Callable[[str], str] = lambda key: key,
    ) -> None:
        self._values: dict[str, Any] = {}
        for key, value in values.items():
            if value is not None or canonical(key) not in self._values:
                self._values[canonical(key)] = value
        self._defaults, self.loggers, self.written = dict(defaults), tuple(loggers), tuple(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def of(self, key: str) -> Any:
        """Look up the value in force: the user's, else the program's default, else None."""
        return self._values.get(key, self._defaults.get(key))

    def number(self, key: str, default: int = 1) -> int:
        """Look up a positive whole number; `default` where the key has none."""
        value = self.of(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def under(self, section: str) -> bool:
        """Say whether the user set a key of a section."""
        return any(key.startswith(f"{section}.") for key in self._values)


@dataclass(frozen=True, kw_only=True)
class Made:
    """Says what a rule made of one value.

    Attributes:
        values: keys here with their values; empty where nothing need be set, or nothing can be.
        why: the reason that the user reads.
    """

    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


Rule = Callable[[str, Any, Settings], Made]
"""(the key as the user wrote it, its value, all settings) -> what the rule makes of it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Describes a key, or a pattern of keys in which * stands for any text.

    Attributes:
        kind: what usually becomes of a value; the rule decides on each.
        to: keys of MegaRL, for people; empty where there is none to set.
        why: what is different in MegaRL, or why the key is refused and what to use.
    """

    key: str
    kind: Kind
    to: str = ""
    why: str = ""
    rule: Rule

    def matches(self, key: str) -> bool:
        if "*" not in self.key:
            return key == self.key
        return re.fullmatch(re.escape(self.key).replace(r"\*", ".+"), key) is not None


def carried(*keys: str, why: str = "") -> list[Entry]:
    """Carry keys that have the same name and meaning in MegaRL."""
    return [Entry(key=key, kind="carried", to=key, why=why, rule=_same) for key in keys]


def renamed(key: str, to: str, why: str, convert: Callable[[Any], Any] = lambda value: value) -> Entry:
    """Translate a key that has another name in MegaRL; a value of null sets nothing."""

    def rule(_: str, value: Any, settings: Settings) -> Made:
        return Made(kind="translated", values={} if value is None else {to: convert(value)}, why=why)

    return Entry(key=key, kind="translated", to=to, why=why, rule=rule)


def met(key: str, why: str) -> Entry:
    """Accept a key that needs no setting: MegaRL does what it asks for, whatever its value."""
    return Entry(key=key, kind="translated", why=why, rule=lambda *_: Made(kind="translated", why=why))


def met_by(key: str, values: Sequence[Any], why: str, otherwise: str) -> Entry:
    """Accept a key if MegaRL does what its value asks for: one of `values`, or null. Refuse other values."""

    def rule(_: str, value: Any, settings: Settings) -> Made:
        if value is None or value in values:
            return Made(kind="translated", why=why)
        return Made(kind="refused", why=otherwise)

    return Entry(key=key, kind="translated", why=f"{why}; other values: {otherwise}", rule=rule)


def refused(key: str, why: str, *, nothing: Sequence[Any] = NOTHING) -> Entry:
    """Refuse a key, unless its value asks for nothing."""

    def rule(_: str, value: Any, settings: Settings) -> Made:
        if not asks_for(value, nothing):
            return Made(kind="translated", why="asks for nothing")
        return Made(kind="refused", why=why)

    return Entry(key=key, kind="refused", why=why, rule=rule)


def part_of(key: str, switches: Sequence[str], why: str) -> Entry:
    """Refuse a key if one of `switches` is on; otherwise the other program does not read it."""

    def rule(_: str, value: Any, settings: Settings) -> Made:
        if any(asks_for(settings.of(switch)) for switch in switches):
            return Made(kind="refused", why=why)
        return Made(kind="translated", why=f"a part of {switches[0]}, which is off")

    return Entry(key=key, kind="refused", why=why, rule=rule)


def ruled(key: str, to: str, why: str, rule: Callable[[str, Any, Settings], Made | Mapping[str, Any]]) -> Entry:
    """Give a key a rule, which returns a `Made`, or only the values to set."""
    kind: Kind = "carried" if to == key else "translated" if to else "refused"

    def whole(name: str, value: Any, settings: Settings) -> Made:
        result = rule(name, value, settings)
        return result if isinstance(result, Made) else Made(kind=kind, values=result, why=why)

    return Entry(key=key, kind=kind, to=to, why=why, rule=whole)


def derived(key: str, to: str, why: str, of: Callable[[Settings], Mapping[str, Any]]) -> Entry:
    """Translate a key whose values in MegaRL depend on further settings."""
    return ruled(key, to, why, lambda _, __, settings: of(settings))


def switch(key: str, to: str, why: str) -> Entry:
    """Translate a key that switches the key `to` on."""
    return ruled(key, to, why, lambda _, value, __: {to: True} if value else {})


def worded(key: str, to: str, words: Mapping[Any, Any], why: str, known: Registry[Any] | None = None) -> Entry:
    """Translate values by `words`; a value without a word stays as it is, if `known` has it."""

    def rule(_: str, value: Any, settings: Settings) -> Made:
        if value is None:
            return Made(kind="translated", why="asks for nothing")
        new = words.get(value, value)
        if new is None or (known is not None and new not in known.names() and ".py:" not in str(new)):
            return Made(kind="refused", why=f"there is no {value!r} here: {why}")
        changed = new != value or to != key
        return Made(kind="translated" if changed else "carried", values={to: new}, why=why if changed else "")

    return Entry(key=key, kind="translated" if to != key else "carried", to=to, why=why, rule=rule)


def _same(key: str, value: Any, settings: Settings) -> Made:
    return Made(kind="carried", values={key: value})

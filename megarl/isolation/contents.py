"""Keeps what an object that a program returned holds: as first seen, however the program answers at the next look."""

from __future__ import annotations

from megarl.isolation.far import CHANGEABLE

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Iterator
    from typing import Any

    from megarl.isolation.remote import Peer

LOOKS = {"__iter__", "__len__", "__bool__", "__getitem__", "__contains__", "__reversed__"}


class Contents:
    """Keeps the contents of one object, until the program is asked for something that may change it.

    Of an instance of a subclass of list, dict, set or bytearray, the data that it holds are kept. Of another object,
    the result of each look is kept, and two looks that contradict each other raise TypeError. Iterators are asked each
    time, and have neither length nor items.
    """

    def __init__(self, peer: Peer, far: Any) -> None:
        self._peer, self._far = peer, far
        self._base: str = getattr(type(far), "_far_base", "")
        self._plain: Any = None
        self._answers: dict[Any, Any] = {}
        self._items: list[Any] = []
        self._source: Any = None
        self._ended = False
        self._keys: bool | None = None

    @property
    def plain(self) -> Any:
        """Return the data that an instance of a subclass of plain data holds."""
        if self._plain is None:
            self._plain = self._peer.ask("plain", self._far)
            if type(self._plain) is not CHANGEABLE[self._base]:
                raise TypeError("other data than its class has")
        return self._plain

    def attribute(self, name: str) -> Any:
        """Return an attribute of the object; raises what the object raised."""
        key = ("get", name)
        if key not in self._answers or hasattr(type(self._far), "__next__"):  # an iterator goes on
            self._answers[key] = self._peer.ask("get", self._far, name)
        return self._answers[key]

    def look(self, name: str, *operands: Any) -> Any:
        """Return the result of one of `LOOKS`, a special method; raises what the object raised."""
        if self._base:
            return self._look_at_plain(name, *operands)
        has = set(dir(type(self._far)))
        if name == "__contains__":
            return any(item is operands[0] or item == operands[0] for item in self._far)
        if "__next__" in has:
            if name in ("__len__", "__getitem__"):
                raise TypeError("an iterator has neither length nor items")
            return self._ask(name)
        if name == "__iter__":
            return self._iterate()
        if name == "__reversed__" and "__iter__" in has:
            return reversed(list(self._iterate()))
        if name == "__len__":
            return self._length()
        if name == "__getitem__":
            return self._item(operands[0], has)
        return self._once(name)

    def _look_at_plain(self, name: str, *operands: Any) -> Any:
        if name == "__bool__":
            return bool(self.plain)
        try:
            return getattr(self.plain, name)(*operands)
        except LookupError:  # a class may have answers for what is missing
            value = self._ask(name, *operands)
            if self._base == "dict":
                self.plain[operands[0]] = value
            return value

    def _ask(self, name: str, *operands: Any) -> Any:
        return self._peer.ask("special", name, self._far, *operands)

    def _once(self, name: str, *operands: Any) -> Any:
        key = (name, *operands)
        try:
            if key not in self._answers:
                self._answers[key] = self._ask(name, *operands)
        except TypeError:  # no key of a dictionary
            return self._ask(name, *operands)
        return self._answers[key]

    def _iterate(self) -> Iterator[Any]:
        if self._source is None:
            self._source = self._ask("__iter__")
        i = 0
        while i < len(self._items) or self._more():
            yield self._items[i]
            i += 1

    def _more(self) -> bool:
        """Fetch the next item into `_items`; returns whether there was one."""
        if self._ended:
            return False
        try:
            self._items.append(next(self._source))
        except StopIteration:
            self._ended = True
            self._check(self._answers.get(("__len__",), len(self._items)), len(self._items))
            return False
        place, item = len(self._items) - 1, self._items[-1]
        if not self._has_keys():
            self._check(self._answers.get(("__getitem__", place), item), item)
        return True

    def _length(self) -> Any:
        length = self._once("__len__")
        if self._ended:
            self._check(length, len(self._items))
        return length

    def _item(self, key: Any, has: set[str]) -> Any:
        if type(key) is int and key < 0 and "__len__" in has:
            value, key = self._once("__getitem__", key), key + self._length()
        else:
            value = self._once("__getitem__", key)
        if self._has_keys():
            return value
        if type(key) is slice and type(value) is list and "__iter__" in has:
            self._check(value, list(self._iterate())[key])
        if type(key) is int and 0 <= key < len(self._items):
            self._check(value, self._items[key])
        elif type(key) is int and key >= 0:
            self._check(self._answers.setdefault(("__getitem__", key), value), value)
        return value

    def _has_keys(self) -> bool:
        """Tell whether the object is a mapping, whose iterator gives keys."""
        if self._keys is None:
            try:
                self._keys = bool(self._peer.ask("get", self._far, "keys"))
            except AttributeError:
                self._keys = False
        return self._keys

    def _check(self, one: Any, other: Any) -> None:
        if not (one is other or one == other or (one != one and other != other)):
            raise TypeError("two looks at what a program returned contradict each other")

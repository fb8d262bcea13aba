"""Writes values as data for the channel between tests and a program, and reads them as exact types of Python.

Nothing of the sender's comes along, neither a class nor a method. What is no plain value is written by a function that
the caller gives, as a mark that the receiver's function reads.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Callable
    from typing import Any

_BIG = 1 << 10_000  # JSON reads at most 4,300 digits
_ATOMS = {str, float, bool, type(None)}
_NAMES = """
int float complex bool str bytes bytearray list tuple set frozenset dict range slice object type memoryview
enumerate zip map filter reversed property staticmethod classmethod super
"""
_TYPES = set(_NAMES.split())
_FACTORIES = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "set": set}
_FACTORIES |= {"tuple": tuple, "complex": complex, "bytes": bytes, "frozenset": frozenset}
_FACTORIES_BY_TYPE: dict[Any, str | None] = {factory: name for name, factory in _FACTORIES.items()} | {None: None}
YES_OR_NO = {name for kind in (str, bytes, float, int, set) for name in dir(kind) if name.startswith("is")}
YES_OR_NO |= {"startswith", "endswith"}
"""Methods of plain values whose answer is a test's outcome."""
_NUMPY = "biufcU"  # kinds of arrays that go over: numbers and texts
# what the standard library makes, by module and name: it is not imported for the sake of a comparison
_COUNTER, _ORDERED, _DEFAULT, _DEQUE = (
    ("collections", name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")
)
_DATES = {"date", "time", "datetime", "timedelta", "timezone"}


def import_module(module: str) -> Any:
    """Import a module as importlib does, which takes longer to import itself."""
    return __import__(module, fromlist=["_"])


def json_writer() -> Callable[[Any], str]:
    """Return a function like `json.dumps`; the module json imports re, which takes longer than most programs."""
    try:
        import _json

        make_encoder: Any = _json.make_encoder
        write = make_encoder(None, None, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
        return lambda value: "".join(write(value, 0))
    except (ImportError, AttributeError, TypeError):  # another Python than CPython, or a later one
        import json

        return json.JSONEncoder(check_circular=False).encode


class _ScannerSettings:
    """Holds the settings that `_json.make_scanner` asks for."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int = True, None, None, float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.__getitem__


def json_reader() -> Callable[[str], Any]:
    """Return a function like `json.loads` for what `json_writer` wrote; raises ValueError for blanks around it."""
    try:
        import _json

        settings: Any = _ScannerSettings
        scan = _json.make_scanner(settings)
    except (ImportError, AttributeError, TypeError):
        import json

        return json.loads

    def read(text: str) -> Any:
        try:
            value, end = scan(text, 0)
        except StopIteration:
            raise ValueError("no JSON") from None
        if end != len(text):
            raise ValueError("more than one JSON value")
        return value

    return read


class Writer:
    """Writes values for JSON. Lists, dictionaries and others that can change are numbered: one that occurs twice
    is one object again.

    Attributes:
        objects: those that can change, by number.
    """

    def __init__(self, other: Callable[[Any], Any], objects: list[Any] | None = None) -> None:
        self.objects = objects if objects is not None else []
        self._numbers = {id(value): i for i, value in enumerate(self.objects)}
        self._other = other

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return value if -_BIG < value < _BIG else {"i": hex(value)}
        name = (kind.__module__, kind.__qualname__)
        if name == _DEFAULT and value.default_factory not in _FACTORIES_BY_TYPE:
            return self._other(value)
        if kind in (list, dict, set, bytearray) or name in (_COUNTER, _ORDERED, _DEFAULT, _DEQUE):
            number = self._numbers.get(id(value))
            if number is not None:
                return {"r": number}
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
            return self.contents(value)
        if kind is tuple:
            return {"t": self._many(value)}
        written = self._fixed(value, kind, name)
        return self._other(value) if written is None else written

    def contents(self, value: Any) -> Any:
        """Write the contents of a value that can change."""
        kind = type(value)
        if kind is list:
            return self._many(value)
        if kind is dict:
            return {"d": self._items(value)}
        if kind is set:
            return {"s": self._many(value)}
        if kind is bytearray:
            return {"ba": value.decode("latin-1")}
        if kind.__name__ == "Counter":
            return {"C": self._items(value)}
        if kind.__name__ == "OrderedDict":
            return {"O": self._items(value)}
        if kind.__name__ == "deque":
            return {"q": [value.maxlen, self._many(value)]}
        factory = value.default_factory
        return {"dd": [_FACTORIES_BY_TYPE[factory], self._items(value)]}

    def _many(self, values: Any) -> list[Any]:
        return [value if type(value) in _ATOMS else self.write(value) for value in values]

    def _items(self, value: Any) -> list[Any]:
        return self._many([part for item in value.items() for part in item])

    def _fixed(self, value: Any, kind: type, name: tuple[str, str]) -> Any:
        """Write a value that cannot change; None: no plain value."""
        if kind is frozenset:
            return {"f": self._many(value)}
        if kind is bytes:
            return {"b": value.decode("latin-1")}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        if kind is range:
            return {"R": self._many((value.start, value.stop, value.step))}
        if kind is slice:
            return {"S": self._many((value.start, value.stop, value.step))}
        if kind.__module__ == "builtins" and kind.__name__ in ("dict_keys", "dict_values", "dict_items"):
            return {"v": [kind.__name__[5:], self._items(dict(value.mapping))]}
        if kind is type and value.__module__ == "builtins" and value.__name__ in _TYPES:
            return {"y": value.__name__}
        if value is Ellipsis or value is NotImplemented:
            return {"e": value is Ellipsis}
        if name == ("decimal", "Decimal"):
            return {"D": str(value)}
        if name == ("fractions", "Fraction"):
            return {"F": self._many((value.numerator, value.denominator))}
        if kind.__module__ == "datetime" and kind.__name__ in _DATES:
            return self._date(value, kind.__name__)
        if kind.__module__ == "numpy" and getattr(value, "dtype", None) is not None:
            return self._numpy(value, kind)
        if kind.__base__ is tuple and _is_named_tuple(kind):
            return {"N": [kind.__name__, list(kind._fields), self._many(value)]}  # type: ignore[attr-defined]
        return None

    def _numpy(self, value: Any, kind: type) -> Any:
        """Write an array as its contents, and a scalar as Python's own; None: no plain value."""
        if value.dtype.kind not in _NUMPY:
            return None
        if kind.__name__ == "ndarray":
            return {"n": [value.dtype.str, self.write(value.tolist())]}
        plain = value.item()
        return None if type(plain) is kind else self.write(plain)

    def _date(self, value: Any, kind: str) -> Any:
        if kind == "timezone":
            return {"T": [kind, self.write(value.utcoffset(None)), str(value.tzname(None))]}
        if kind == "timedelta":
            return {"T": [kind, value.days, value.seconds, value.microseconds]}
        if kind == "date":
            return {"T": [kind, value.year, value.month, value.day]}
        zone = value.tzinfo
        if zone is not None and type(zone).__name__ != "timezone":
            return None
        clock = [value.hour, value.minute, value.second, value.microsecond, self.write(zone)]
        day = [value.year, value.month, value.day] if kind == "datetime" else []
        return {"T": [kind, *day, *clock, value.fold]}


def _is_named_tuple(kind: Any) -> bool:
    """Tell whether a class is as `collections.namedtuple` makes it: one with methods of its own is a program's."""
    if not {"_fields", "_make"} <= vars(kind).keys():
        return False
    names = {name for name in vars(kind) if not name.startswith("_")}
    return names == set(kind._fields) and YES_OR_NO.isdisjoint(names)


class Reader:
    """Reads what a `Writer` wrote. It raises an exception for anything else.

    Args:
        other: reads the marks of the other side's function; it is given the mark's letter and content.
        objects: those that the other side numbered before.
    """

    def __init__(self, other: Callable[[str, Any, Reader], Any], objects: list[Any] | None = None) -> None:
        self.objects = objects if objects is not None else []
        self._other = other

    def read(self, data: Any) -> Any:
        kind = type(data)
        if kind in _ATOMS or kind is int:
            return data
        if kind is list:
            return self._changeable([], data)
        ((mark, content),) = data.items()
        if mark == "t":
            return tuple(self._many(content))
        if mark == "r":
            return self.objects[_count(content)]
        if mark in _EMPTY:
            return self._changeable(_EMPTY[mark](content), data)
        if mark in _FIXED:
            return _FIXED[mark](self._many(content) if type(content) is list else content)
        if mark == "v":
            view, items = content
            return getattr(self._dict(items), {"keys": "keys", "values": "values", "items": "items"}[view])()
        if mark == "N":
            name, fields, values = content
            return _named_tuple(name, tuple(fields))(*self._many(values))
        return self._other(mark, content, self)

    def replace(self, number: int, data: Any) -> None:
        """Replace the contents of a numbered object, one that can change."""
        value = self.objects[_count(number)]
        mark = "l" if type(data) is list else next(iter(data))
        if type(value) is not type(_EMPTY[mark](data if mark == "l" else data[mark])):
            raise ValueError("an argument of another type came back")
        value.clear()
        self._fill(value, data)

    def _changeable(self, value: Any, data: Any) -> Any:
        self.objects.append(value)
        self._fill(value, data)
        return value

    def _fill(self, value: Any, data: Any) -> None:
        if type(data) is list:
            value.extend(self._many(data))
            return
        ((mark, content),) = data.items()
        if mark == "ba":
            value.extend(content.encode("latin-1"))
        elif mark == "s":
            value.update(self._many(content))
        elif mark == "q":
            value.extend(self._many(content[1]))
        else:
            items = self._many(content[1] if mark == "dd" else content)
            for key, item in zip(items[::2], items[1::2], strict=True):
                value[key] = item

    def _many(self, data: list[Any]) -> list[Any]:
        return [item if type(item) in _ATOMS or type(item) is int else self.read(item) for item in data]

    def _dict(self, content: list[Any]) -> dict[Any, Any]:
        items = self._many(content)
        return dict(zip(items[::2], items[1::2], strict=True))


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError("no number of a value")
    return number


def _date_of(parts: list[Any]) -> Any:
    dates = import_module("datetime")
    kind, *parts = parts
    if kind == "timezone":
        return dates.timezone(*parts)
    if kind == "timedelta":
        return dates.timedelta(days=parts[0], seconds=parts[1], microseconds=parts[2])
    if kind == "date":
        return dates.date(*parts)
    *parts, fold = parts
    return {"time": dates.time, "datetime": dates.datetime}[kind](*parts, fold=fold)


def _type_named(name: str) -> type:
    if name not in _TYPES:
        raise ValueError("no type of Python")
    return getattr(sys.modules["builtins"], name)


_named_tuples: dict[Any, Any] = {}


def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    if not YES_OR_NO.isdisjoint(fields):
        raise ValueError("a field with the name of a method")
    if (name, fields) not in _named_tuples:
        _named_tuples[name, fields] = import_module("collections").namedtuple(name, fields)
    return _named_tuples[name, fields]


def _array(dtype: str, contents: Any) -> Any:
    if dtype[1:2] not in _NUMPY or not dtype[2:].isdigit():
        raise ValueError("no array of numbers or texts")
    return import_module("numpy").array(contents, dtype=dtype)


_EMPTY: dict[str, Callable[[Any], Any]] = {
    "l": lambda _: [],
    "d": lambda _: {},
    "s": lambda _: set(),
    "ba": lambda _: bytearray(),
    "C": lambda _: import_module("collections").Counter(),
    "O": lambda _: import_module("collections").OrderedDict(),
    "q": lambda content: import_module("collections").deque(maxlen=content[0]),
    "dd": lambda content: import_module("collections").defaultdict(_FACTORIES[content[0]] if content[0] else None),
}
_FIXED: dict[str, Callable[[Any], Any]] = {
    "i": lambda digits: int(digits, 16),
    "f": frozenset,
    "b": lambda text: text.encode("latin-1"),
    "c": lambda parts: complex(*parts),
    "R": lambda parts: range(*parts),
    "S": lambda parts: slice(*parts),
    "y": _type_named,
    "e": lambda dots: Ellipsis if dots else NotImplemented,
    "D": lambda text: import_module("decimal").Decimal(text),
    "F": lambda parts: import_module("fractions").Fraction(*parts),
    "T": _date_of,
    "n": lambda parts: _array(*parts),
}

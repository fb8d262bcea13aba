"""Stands in for objects of another process: what is asked of a stand-in is asked there, by the `Peer` that made it."""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Callable
    from typing import Any

_OPERATORS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
BINARY = {f"__{side}{name}__" for name in _OPERATORS.split() for side in ("", "r", "i")}
COMPARISONS = {"__eq__", "__lt__", "__le__", "__gt__", "__ge__"}
_CONVERSIONS = """
len bool int float index complex abs neg pos invert round trunc floor ceil iter next reversed contains format getitem
call await
"""
CONVERSIONS = {f"__{name}__" for name in _CONVERSIONS.split()}
SPECIAL = BINARY | COMPARISONS | CONVERSIONS | {"__hash__", "__str__", "__repr__", "__setitem__", "__delitem__"}
SPECIAL |= {"__enter__", "__exit__"}
IMMUTABLE = {"int": int, "float": float, "complex": complex, "str": str, "bytes": bytes, "tuple": tuple}
IMMUTABLE |= {"frozenset": frozenset}
CHANGEABLE = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
MARKS = ("_far_number", "_far_peer", "_far_made", "_far_computed")


class FarType(type):
    """Makes stand-ins for classes of the other side. The instances of such a stand-in are `Far`."""

    _far_number: int
    _far_peer: Any  # the `Peer`
    _far_family: tuple[int, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._far_peer.make(cls, args, kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return cls._far_number in getattr(type(value), "_far_family", ())

    def __subclasscheck__(cls, other: Any) -> bool:
        return cls._far_number in getattr(other, "_far_family", ())

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_far_"):
            raise AttributeError(name)
        return cls._far_peer.attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._far_peer.ask("set", cls, name, value)

    def __iter__(cls) -> Any:
        return cls._far_peer.ask("special", "__iter__", cls)

    def __getitem__(cls, key: Any) -> Any:
        return cls._far_peer.ask("special", "__getitem__", cls, key)

    def __len__(cls) -> int:
        return cls._far_peer.ask("special", "__len__", cls)

    def __bool__(cls) -> bool:
        return True

    def __repr__(cls) -> str:
        return str(cls._far_peer.ask("special", "__repr__", cls))


class Far:
    """Stands in for an object of the other side; its type has the special methods that the object's class has there."""

    __slots__ = MARKS

    def __getattr__(self, name: str) -> Any:
        return self._far_peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._far_peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._far_peer.ask("del", self, name)

    def __eq__(self, other: object) -> Any:
        if type(other) is type(self) and other._far_number == self._far_number:
            return True
        return NotImplemented

    def __hash__(self) -> int:
        return hash(("far", self._far_number))

    def __copy__(self) -> Any:
        return self._far_peer.ask("copy", self, False)

    def __deepcopy__(self, _: Any) -> Any:
        return self._far_peer.ask("copy", self, True)

    def __str__(self) -> str:
        return str(self._far_peer.operate("__str__", self, ()))

    def __repr__(self) -> str:
        return str(self._far_peer.operate("__repr__", self, ()))

    def __format__(self, how: str) -> str:
        return str(self._far_peer.operate("__format__", self, (how,)))


def far_number(value: Any) -> int | None:
    """Return the number of an object of the other side; None: it is of this one."""
    kind = type(value)
    if kind is FarType or isinstance(kind, FarType):
        return value._far_number
    if isinstance(value, type):
        return vars(value).get("_far_number_of_type")
    if hasattr(kind, "_far_family") or isinstance(value, BaseException):  # plain data with methods, or an exception
        return vars(value).get("_far_number")
    return None


class _OfType:
    """Gives a class a value of its own for an attribute that its instances hold in a slot."""

    def __init__(self, value: Any, slot: Any) -> None:
        self._value, self._slot = value, slot

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._value if instance is None else self._slot.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        self._slot.__set__(instance, value)


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *operands: Any, **named: Any) -> Any:
        if name == "__call__":
            return self._far_peer.operate(name, self, (operands, named))
        return self._far_peer.operate(name, self, operands)

    method.__name__ = name
    return method


_METHODS = {name: _method(name) for name in SPECIAL}


class FarTypes:
    """Makes the classes of stand-ins for the objects of one peer, each once."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer
        self._types: dict[Any, Any] = {}
        self._exceptions: dict[int, Any] = {}

    def kind(self, described: list[Any]) -> Any:
        """Return the class of stand-ins for a class; the other side describes it the first time that it names it."""
        number = described[0]
        if type(number) is not int:
            raise ValueError("no number of a class")
        if number not in self._types:
            _, name, family, special, meta = described
            body: dict[str, Any] = {n: _METHODS[n] for n in special if n not in ("__str__", "__repr__", "__format__")}
            body |= {"__slots__": (), "_far_family": tuple(family), "_far_number_of_type": number}
            body["_far_listed"] = meta in ("EnumMeta", "EnumType")  # its call finds what there is
            if "__eq__" in body and "__hash__" not in body:
                body["__hash__"] = _METHODS["__hash__"]
            kind = FarType.__new__(FarType, str(name), (Far,), body)
            type.__setattr__(kind, "_far_number", _OfType(number, Far.__dict__["_far_number"]))
            type.__setattr__(kind, "_far_peer", _OfType(self._peer, Far.__dict__["_far_peer"]))
            self._types[number] = kind
        return self._types[number]

    def changeable(self, kind: Any, base: str) -> Any:
        """Return the class of stand-ins for instances that hold a list, dict, set or bytearray."""
        key = (kind, base)
        if key not in self._types:
            plain = CHANGEABLE[base]
            body = {"__slots__": (), "_far_base": base, "__class__": property(lambda _: plain)}
            self._types[key] = FarType.__new__(FarType, kind.__name__, (kind,), body)
        return self._types[key]

    def with_plain(self, kind: Any, base: type) -> Any:
        """Return a subclass of data that cannot change, with the attributes of the other side's class."""
        key = (kind, base)
        if key not in self._types:
            attribute = lambda value, name: self._peer.attribute(value, name)  # noqa: E731
            body = {"__getattr__": attribute, "_far_family": kind._far_family, "_far_made": False}
            self._types[key] = type(kind.__name__, (base,), body)
        return self._types[key]

    def exception(self, lineage: list[Any]) -> Any:
        """Return the class of an exception of the other side: Python's own, or one that stands in for it."""
        number, module, name, above = lineage
        if number not in self._exceptions:
            near = _near_exception(module, name)
            if near is None:
                body: dict[str, Any] = {"_far_number_of_type": number, "_far_made": False}
                body |= {"__getattr__": _attribute_of_exception, "__str__": _text_of_exception}
                bases = tuple(self.exception(base) for base in above) or (Exception,)
                near = type(str(name).rpartition(".")[2], bases, body)
            self._exceptions[number] = near
        return self._exceptions[number]


def _near_exception(module: str, name: str) -> Any:
    """Find a class of exceptions here: one of Python's, or of a module that has been imported here; None: no such."""
    if module.partition(".")[0] in ("__main__", "unittest", "megarl"):
        return None
    kind = getattr(builtins if module == "builtins" else sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _attribute_of_exception(value: Any, name: str) -> Any:
    if name.startswith("_far_") or "_far_peer" not in vars(value):
        raise AttributeError(name)
    return value._far_peer.attribute(value, name)


def _text_of_exception(value: Any) -> str:
    if "_far_peer" in vars(value):
        return str(value._far_peer.ask("special", "__str__", value))
    return BaseException.__str__(value)

"""Objects that live in another process: what is asked of them is asked there, over a channel.

Both sides are a `Peer`. What goes over the channel is plain data (`megarl.isolation.plain`), and marks for objects:

    {"h": [number, class, base]}  an object of the sender, which keeps it; "base" is what it holds as plain data
    {"k": ...}, {"K": ...}        a class of the sender, an exception class
    {"u": number}                 an object of the receiver, which it once gave
    {"E": ...}                    an exception
"""

from __future__ import annotations

import builtins
import os
import sys

from megarl.isolation.plain import Reader, Writer, json_reader, json_writer

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Callable
    from typing import Any

LARGEST = 64 << 20
"""Bytes of a message."""
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
_IMMUTABLE = {"int": int, "float": float, "complex": complex, "str": str, "bytes": bytes, "tuple": tuple}
_IMMUTABLE |= {"frozenset": frozenset}
CHANGEABLE = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
_ENDINGS = (StopIteration, StopAsyncIteration)
_MARKS = ("_far_number", "_far_peer", "_far_made", "_far_computed")


class ChannelBroken(BaseException):
    """The other side has ended, or does not keep to the form; no test's `except Exception` takes it."""


class FarType(type):
    """A class of the other side. Its instances are `Far`."""

    _far_number: int
    _far_peer: Peer
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
    """An object of the other side; its type has the special methods that the object's class has there."""

    __slots__ = _MARKS

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


class Peer:
    """One side of the channel.

    Attributes:
        broken: whether the other side has ended.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read, self._write = os.read, os.write
        self._dumps, self._loads = json_writer(), json_reader()
        self._given: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._described: set[int] = set()
        self._types: dict[Any, Any] = {}
        self._objects: dict[tuple[int, bool], Any] = {}
        self._exceptions: dict[int, Any] = {}
        self.broken = False

    # ------------------------------------------------------------------------------------------ asking and serving

    def ask(self, operation: str, *operands: Any) -> Any:
        """What the other side answers; raises what it raised."""
        writer = Writer(self.give)
        self._send(["?", operation, [writer.write(operand) for operand in operands]])
        while True:
            message = self._receive()
            if message[0] != "?":
                break
            self._answer(message)
        try:
            word, changed, result = message
            reader = Reader(self.take, writer.objects)
            for number, contents in changed:
                reader.replace(number, contents)
            value = reader.read(result)
        except ChannelBroken:
            raise
        except Exception as e:
            raise self._break(f"no answer: {e!r:.200}") from None
        if word == "=":
            return value
        if isinstance(value, _ENDINGS) and not (operation == "special" and operands[0] in ("__next__", "__anext__")):
            raise RuntimeError(f"the program raised {type(value).__name__}")
        if not isinstance(value, BaseException):
            raise self._break("no exception was raised")
        raise value

    def serve(self) -> None:
        """Answer until the other side ends."""
        try:
            while True:
                message = self._receive()
                if message[0] == "?":
                    self._answer(message)
        except ChannelBroken:
            pass

    def _answer(self, message: list[Any]) -> None:
        _, operation, data = message
        try:
            reader = Reader(self.take)
            operands = [reader.read(one) for one in data]
        except Exception as e:
            raise self._break(f"no request: {e!r:.200}") from None
        objects = reader.objects
        before = [_parts(value) for value in objects]
        word = "="
        try:
            result = self.do(operation, operands)
        except ChannelBroken:
            raise
        except BaseException as e:
            word, result = "!", e
        writer = Writer(self.give, objects)
        changed: list[Any] = []
        try:
            for i, (value, parts) in enumerate(zip(objects[: len(before)], before, strict=True)):
                now = _parts(value)
                if len(now) != len(parts) or not all(map(_same, now, parts)):
                    changed.append([i, writer.contents(value)])
            answer = [word, changed, writer.write(result)]
            self._send(answer)
        except ChannelBroken:
            raise
        except BaseException as e:
            self._send(["!", [], self._exception(RuntimeError(f"no value to answer with: {type(e).__name__}"))])

    def do(self, operation: str, operands: list[Any]) -> Any:
        """What the other side asks for."""
        raise NotImplementedError

    def _send(self, message: Any) -> None:
        data = self._dumps(message).encode()
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[self._write(self._descriptor, data) :]
        except OSError as e:
            raise self._break(str(e)) from None

    def _receive(self) -> list[Any]:
        size = int.from_bytes(self._take(4), "big")
        if size > LARGEST:
            raise self._break("a message is too long")
        data = self._take(size)
        try:
            message = self._loads(data.decode("ascii"))
            if type(message) is list and len(message) == 3 and message[0] in ("?", "=", "!"):
                return message
        except (ValueError, RecursionError):
            pass
        raise self._break("a message has another form")

    def _take(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._read(self._descriptor, min(size - len(parts), 1 << 20))
            except OSError as e:
                raise self._break(str(e)) from None
            if not part:
                raise self._break("the other side has ended")
            parts += part
        return bytes(parts)

    def _break(self, why: str) -> ChannelBroken:
        self.broken = True
        return ChannelBroken(why)

    # ------------------------------------------------------------------------------------------ giving

    def give(self, value: Any) -> Any:
        """The mark of an object that is no plain data."""
        kind = type(value)
        number = far_number(value)
        if number is not None:
            return {"u": number}
        if isinstance(value, BaseException):
            return self._exception(value)
        if isinstance(value, type):
            return self._class(value)
        base, content = "", None
        for family, known in (("=", _IMMUTABLE), ("~", CHANGEABLE)):
            for name, plain in known.items():
                if isinstance(value, plain):
                    base = family + name
                    content = Writer(self.give).write(_as(plain, value)) if family == "=" else None
        return {"h": [self.number(value), self._class(kind), base, content]}

    def number(self, value: Any) -> int:
        """Of an object that the other side may ask for from now on."""
        number = self._numbers.setdefault(id(value), len(self._given))
        if number == len(self._given):
            self._given.append(value)
        return number

    def _class(self, kind: type) -> Any:
        if issubclass(kind, BaseException):
            return {"K": self._lineage(kind)}
        number = self.number(kind)
        if number in self._described:
            return {"k": [number]}
        self._described.add(number)
        above = [k for k in type.__dict__["__mro__"].__get__(kind) if k is not object]
        special = sorted({name for k in above for name in vars(k) if name in SPECIAL})
        return {"k": [number, str(kind.__name__), [self.number(k) for k in above], special, type(kind).__name__]}

    def _exception(self, value: BaseException) -> Any:
        reading = Writer(self.give)
        try:
            arguments = [reading.write(one) for one in value.args]
        except Exception:
            arguments = []
        return {"E": [self.number(value), self._lineage(type(value)), arguments]}

    def _lineage(self, kind: type) -> list[Any]:
        """A class of exceptions and those that it comes from, up to Python's own."""
        bases = () if kind.__module__ == "builtins" else type.__dict__["__bases__"].__get__(kind)
        above = [self._lineage(base) for base in bases if issubclass(base, BaseException)]
        return [self.number(kind), str(kind.__module__), str(kind.__qualname__), above]

    # ------------------------------------------------------------------------------------------ taking

    def own(self, number: int) -> Any:
        """An object of this side that the other side asks for."""
        return self._given[number]

    def take(self, mark: str, content: Any, reader: Reader) -> Any:
        """What a mark stands for."""
        if mark == "u":
            return self.own(content)
        if mark == "k":
            return self._type(content)
        if mark == "K":
            return self._exception_type(content)
        if mark == "E":
            number, lineage, arguments = content
            return self._raised(number, self._exception_type(lineage), [reader.read(one) for one in arguments])
        if mark == "h":
            number, marked, base, plain = content
            ((_, described),) = marked.items()
            kind = self._type(described)
            if base[:1] == "=":
                return self._with_plain(number, kind, _IMMUTABLE[base[1:]], Reader(self.take).read(plain))
            return self.far(number, kind, base[1:])
        raise ValueError("an unknown mark")

    def far(self, number: int, kind: Any, base: str = "", *, made: bool = False, computed: bool = False) -> Any:
        """The one proxy of an object; those that are computed are one each."""
        known = None if computed else self._objects.get((number, made))
        if known is not None:
            return known
        if base:
            kind = self._changeable_type(kind, base)
        value = object.__new__(kind)
        for name, content in zip(_MARKS, (number, self, made, computed), strict=True):
            object.__setattr__(value, name, content)
        if not computed:
            self._objects[number, made] = value
        return value

    def _type(self, described: list[Any]) -> Any:
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
            type.__setattr__(kind, "_far_peer", _OfType(self, Far.__dict__["_far_peer"]))
            self._types[number] = kind
        return self._types[number]

    def _changeable_type(self, kind: Any, base: str) -> Any:
        key = (kind, base)
        if key not in self._types:
            plain = CHANGEABLE[base]
            body = {"__slots__": (), "_far_base": base, "__class__": property(lambda _: plain)}
            made = FarType.__new__(FarType, kind.__name__, (kind,), body)
            self._types[key] = made
        return self._types[key]

    def _with_plain(self, number: int, kind: Any, base: type, plain: Any) -> Any:
        key = (kind, base)
        if type(plain) is not base:
            raise ValueError("other data than its class has")
        if key not in self._types:
            attribute = lambda value, name: self.attribute(value, name)  # noqa: E731
            body = {"__getattr__": attribute, "_far_family": kind._far_family, "_far_made": False}
            self._types[key] = type(kind.__name__, (base,), body)
        value = self._types[key](plain)
        value._far_number = number
        return value

    def _exception_type(self, lineage: list[Any]) -> Any:
        number, module, name, above = lineage
        if number not in self._exceptions:
            near = _near_exception(module, name)
            if near is None:
                body: dict[str, Any] = {"_far_number_of_type": number, "_far_made": False}
                body |= {"__getattr__": _attribute_of_exception, "__str__": _text_of_exception}
                bases = tuple(self._exception_type(base) for base in above) or (Exception,)
                near = type(str(name).rpartition(".")[2], bases, body)
            self._exceptions[number] = near
        return self._exceptions[number]

    def _raised(self, number: int, kind: Any, arguments: list[Any]) -> BaseException:
        try:
            value = kind(*arguments)
        except Exception:
            value = kind.__new__(kind)
            value.args = tuple(arguments)
        if not isinstance(value, BaseException):
            raise ValueError("no exception")
        value._far_number, value._far_peer = number, self  # type: ignore[attr-defined]
        return value

    # ------------------------------------------------------------------------------------------ what proxies do

    def make(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a class of the other side."""
        return self.ask("call", kind, args, kwargs)

    def attribute(self, far: Any, name: str) -> Any:
        """Of an object of the other side."""
        return self.ask("get", far, name)

    def operate(self, name: str, far: Any, operands: tuple[Any, ...]) -> Any:
        """A special method of an object of the other side."""
        return self.ask("special", name, far, *operands)


def far_number(value: Any) -> int | None:
    """Of an object of the other side; None: it is of this one."""
    kind = type(value)
    if kind is FarType or isinstance(kind, FarType):
        return value._far_number
    if isinstance(value, type):
        return vars(value).get("_far_number_of_type")
    if hasattr(kind, "_far_family") or isinstance(value, BaseException):  # plain data with methods, or an exception
        return vars(value).get("_far_number")
    return None


class _OfType:
    """An attribute that a class has itself, and its instances otherwise."""

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


def _same(a: Any, b: Any) -> bool:
    return a is b


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for item in dict.items(value) for part in item]
    return list(value)


def _as(plain: Any, value: Any) -> Any:
    """What an instance of a subclass holds, as the class itself has it."""
    if plain is tuple or plain is frozenset:
        return plain(plain.__iter__(value))
    if plain is complex:
        return complex(value.real, value.imag)
    if plain in (str, bytes):
        return plain.__getitem__(value, slice(None)) if plain is bytes else plain.__str__(value)
    return plain.__add__(value, 0) if plain is int else plain.__add__(value, 0.0)


def _near_exception(module: str, name: str) -> Any:
    """The class of that name here: one of Python's, or of a module that has been imported here."""
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.partition(".")[0] in ("__main__", "unittest", "megarl"):
        return None
    else:
        found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _attribute_of_exception(value: Any, name: str) -> Any:
    if name.startswith("_far_") or "_far_peer" not in vars(value):
        raise AttributeError(name)
    return value._far_peer.attribute(value, name)


def _text_of_exception(value: Any) -> str:
    if "_far_peer" in vars(value):
        return str(value._far_peer.ask("special", "__str__", value))
    return BaseException.__str__(value)

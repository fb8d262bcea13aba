"""Asks and answers about objects that live in another process, over a channel.

Both sides are a `Peer`. Plain data (`megarl.isolation.plain_values`) go over the channel, and marks for objects:

    {"h": [number, class, base]}  an object of the sender, which keeps it; "base" is what it holds as plain data
    {"k": ...}, {"K": ...}        a class of the sender, an exception class
    {"u": number}                 an object of the receiver, which it once gave
    {"E": ...}                    an exception
"""

from __future__ import annotations

import os

from megarl.isolation.far import CHANGEABLE, IMMUTABLE, MARKS, SPECIAL, FarTypes, far_number
from megarl.isolation.plain_values import Reader, Writer, json_reader, json_writer

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from typing import Any

LARGEST = 64 << 20
"""Bytes of a message."""
_ENDINGS = (StopIteration, StopAsyncIteration)


class ChannelBroken(BaseException):
    """The other side has ended, or does not keep to the form; no test's `except Exception` takes it."""


class Peer:
    """Asks and answers on one side of a channel between two processes; holds the objects that it gave and was given.

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
        self._objects: dict[tuple[int, bool], Any] = {}
        self._types = FarTypes(self)
        self.broken = False

    # ------------------------------------------------------------------------------------------ asking and serving

    def ask(self, operation: str, *operands: Any) -> Any:
        """Ask the other side, and return its answer; raises what it raised."""
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
            operands = [reader.read(operand) for operand in data]
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
        """Do what the other side asks for, and return the result."""
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
        """Return the mark of an object that is no plain data."""
        kind = type(value)
        number = far_number(value)
        if number is not None:
            return {"u": number}
        if isinstance(value, BaseException):
            return self._exception(value)
        if isinstance(value, type):
            return self._class(value)
        base, content = "", None
        for family, known in (("=", IMMUTABLE), ("~", CHANGEABLE)):
            for name, plain in known.items():
                if isinstance(value, plain):
                    base = family + name
                    content = Writer(self.give).write(_as(plain, value)) if family == "=" else None
        return {"h": [self.number(value), self._class(kind), base, content]}

    def number(self, value: Any) -> int:
        """Return the number of an object, which the other side may ask for from now on."""
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
            arguments = [reading.write(argument) for argument in value.args]
        except Exception:
            arguments = []
        return {"E": [self.number(value), self._lineage(type(value)), arguments]}

    def _lineage(self, kind: type) -> list[Any]:
        """Return a class of exceptions and those that it comes from, up to Python's own."""
        bases = () if kind.__module__ == "builtins" else type.__dict__["__bases__"].__get__(kind)
        above = [self._lineage(base) for base in bases if issubclass(base, BaseException)]
        return [self.number(kind), str(kind.__module__), str(kind.__qualname__), above]

    # ------------------------------------------------------------------------------------------ taking

    def own(self, number: int) -> Any:
        """Return an object of this side that the other side asks for."""
        return self._given[number]

    def take(self, mark: str, content: Any, reader: Reader) -> Any:
        """Return what a mark stands for."""
        if mark == "u":
            return self.own(content)
        if mark == "k":
            return self._types.kind(content)
        if mark == "K":
            return self._types.exception(content)
        if mark == "E":
            number, lineage, arguments = content
            return self._raised(
                number, self._types.exception(lineage), [reader.read(argument) for argument in arguments]
            )
        if mark == "h":
            number, marked, base, plain = content
            ((_, described),) = marked.items()
            kind = self._types.kind(described)
            if base[:1] == "=":
                return self._with_plain(number, kind, IMMUTABLE[base[1:]], Reader(self.take).read(plain))
            return self.far(number, kind, base[1:])
        raise ValueError("an unknown mark")

    def far(self, number: int, kind: Any, base: str = "", *, made: bool = False, computed: bool = False) -> Any:
        """Return the one stand-in of an object; each computed object has a new one."""
        known = None if computed else self._objects.get((number, made))
        if known is not None:
            return known
        if base:
            kind = self._types.changeable(kind, base)
        value = object.__new__(kind)
        for name, content in zip(MARKS, (number, self, made, computed), strict=True):
            object.__setattr__(value, name, content)
        if not computed:
            self._objects[number, made] = value
        return value

    def _with_plain(self, number: int, kind: Any, base: type, plain: Any) -> Any:
        if type(plain) is not base:
            raise ValueError("other data than its class has")
        value = self._types.with_plain(kind, base)(plain)
        value._far_number = number
        return value

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
        """Return an attribute of an object of the other side."""
        return self.ask("get", far, name)

    def operate(self, name: str, far: Any, operands: tuple[Any, ...]) -> Any:
        """Call a special method of an object of the other side."""
        return self.ask("special", name, far, *operands)


def _same(a: Any, b: Any) -> bool:
    return a is b


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for item in dict.items(value) for part in item]
    return list(value)


def _as(plain: Any, value: Any) -> Any:
    """Return what an instance of a subclass holds, as an instance of the class itself."""
    if plain is tuple or plain is frozenset:
        return plain(plain.__iter__(value))
    if plain is complex:
        return complex(value.real, value.imag)
    if plain in (str, bytes):
        return plain.__getitem__(value, slice(None)) if plain is bytes else plain.__str__(value)
    return plain.__add__(value, 0) if plain is int else plain.__add__(value, 0.0)

"""Loads a response's program, and answers requests to it, in the program's process.

The program can change all of this, so that nobody may trust its answers.
"""

from __future__ import annotations

import _operator as operator
import builtins
import sys

from megarl.isolation.remote import Peer

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Callable
    from typing import Any

_SPECIAL: dict[str, Callable[..., Any]] = {
    "__iter__": iter,
    "__next__": next,
    "__len__": len,
    "__str__": str,
    "__repr__": repr,
    "__hash__": hash,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
}
_DEEPER = 40  # frames of this file and those below it, which are not the program's


class Program(Peer):
    """Answers requests on the program's side."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._main = type(sys)("response")  # what a program does as "__main__" is not for tests
        sys.modules["__main__"] = sys.modules["response"] = self._main
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]

    def do(self, operation: str, operands: list[Any]) -> Any:
        return getattr(self, f"_do_{operation}")(*operands)

    def _do_load(self, source: str) -> None:
        sys.setrecursionlimit(sys.getrecursionlimit() + _DEEPER)
        try:  # noqa: SIM105 (contextlib takes as long to import as most programs run)
            exec(compile(source, "response.py", "exec", dont_inherit=True), vars(self._main))
        except SystemExit:  # what it has defined is there
            pass

    def _do_name(self, name: str) -> Any:
        try:
            return vars(self._main)[name]
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None

    def _do_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def _do_get(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def _do_set(self, value: Any, name: str, content: Any) -> None:
        setattr(value, name, content)

    def _do_del(self, value: Any, name: str) -> None:
        delattr(value, name)

    def _do_special(self, name: str, value: Any, *operands: Any) -> Any:
        if name == "__call__":
            args, kwargs = operands
            return value(*args, **kwargs)
        if name in _SPECIAL:
            return _SPECIAL[name](value, *operands)
        return getattr(type(value), name)(value, *operands)

    def _do_plain(self, value: Any) -> Any:
        """Return what an instance of a subclass of list, dict, set or bytearray holds."""
        kind: Any = next(kind for kind in (list, dict, set, bytearray) if isinstance(value, kind))
        return dict(kind.items(value)) if kind is dict else kind(kind.__iter__(value))

    def _do_copy(self, value: Any, deep: bool) -> Any:
        import copy

        return copy.deepcopy(value) if deep else copy.copy(value)

    def _do_await(self, coroutine: Any) -> Any:
        import asyncio

        return asyncio.run(coroutine)

    def take(self, mark: str, content: Any, reader: Any) -> Any:
        if mark != "g":
            return super().take(mark, content, reader)
        module, path = content
        value: Any = __import__(module, fromlist=["_"])
        for name in path.split("."):
            value = getattr(value, name)
        return value


def main(descriptor: int) -> None:
    """Answer until the channel ends; then end without the program's exit handlers."""
    import os

    Program(descriptor).serve()
    os._exit(0)

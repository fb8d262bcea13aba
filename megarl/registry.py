"""Registers the code that a configuration key can name: MegaRL's own, or in a user's file. Torch-free."""

from __future__ import annotations

import builtins
import difflib
import hashlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from megarl.own_code import check_runs, in_a_line, torch_as_before

T = TypeVar("T")


class Registry(Generic[T]):
    """Holds the functions or classes that one configuration key can name.

    A value of the key is a registered name, or `path/to/file.py:name`.

    Attributes:
        key: the configuration key, "reward.name", as messages call it.
    """

    def __init__(
        self,
        key: str,
        noun: str,
        *,
        lazy: Mapping[str, str] | None = None,
        package: str | None = None,
        attribute: str | None = None,
        awaits: bool = False,
    ) -> None:
        """
        Args:
            key: see the class.
            noun: what it names: "function" or "class".
            lazy: registered name -> "module:attribute", imported when the name is loaded.
            package: every module of it is a name too, for the attribute of the same name in it.
            attribute: that attribute's name, where it is the same in all modules.
            awaits: whether an `async def` may be named.
        """
        self.key, self._noun, self._awaits = key, noun, awaits
        self._lazy = dict(lazy or {})
        if package is not None:
            self._lazy |= {name: f"{package}.{name}:{attribute or name}" for name in _modules(package)}
        self._registered: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a function or class known under a name."""

        def add(thing: T) -> T:
            assert name not in self.names(), f"{self.key} = {name!r} is registered twice"
            self._registered[name] = thing
            return thing

        return add

    def add(self, name: str, thing: T) -> None:
        """Make a function or class known under a name of its own, in this process; raises ValueError as `load`."""
        self._check_runs(thing, name)
        self._registered[name] = thing

    def was_added(self, name: str) -> bool:
        """Tell whether the name stands for something that this process alone has."""
        return name in self._registered

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted({*self._lazy, *self._registered})

    def is_ours(self, name: str) -> bool:
        """Tell whether MegaRL has what the name stands for."""
        return name in self._lazy

    def check(self, value: str) -> None:
        """Raise ValueError where `load` does. A user's file is imported, code of MegaRL is not."""
        if value not in self.names():
            self.load(value)

    def load(self, value: str) -> T:
        """Return the function or class that the value names.

        Raises:
            ValueError: unknown name (the known ones are listed, nearest first), no such file, a file without such a
                function or class, one that fails when it is imported, or an `async def` that nothing awaits.
        """
        if value in self._registered:
            return self._registered[value]
        if value in self._lazy:
            module, _, attribute = self._lazy[value].partition(":")
            return cast(T, getattr(importlib.import_module(module), attribute))
        path, sep, name = value.rpartition(":")
        if sep and path.endswith(".py"):
            return self._from_file(path, name)
        names = self.names()
        near = difflib.get_close_matches(value, names, n=max(len(names), 1), cutoff=0.4)
        known = "".join(f"{name}, " for name in [*near, *(name for name in names if name not in near)])
        known += "or " if names else ""
        raise ValueError(f"{self.key} = {value!r} is not known; use {known}path/to/file.py:{self._noun}")

    def _from_file(self, path: str, name: str) -> T:
        if not os.path.isfile(path):
            raise ValueError(f"{self.key}: no file at {path!r}")
        try:
            module = _import_file(path)
        except (Exception, SystemExit) as e:  # a user's file can fail in any way
            raise ValueError(f"{self.key}: importing {path!r} failed: {in_a_line(e)}") from e
        thing = getattr(module, name, None)
        if not callable(thing):
            public = {key: value for key, value in vars(module).items() if not key.startswith("_") and callable(value)}
            defined = [key for key, value in public.items() if getattr(value, "__module__", None) == module.__name__]
            raise ValueError(
                f"{self.key}: {path!r} has no {self._noun} {name!r}; it has {', '.join(defined) or 'none'}"
            )
        self._check_runs(thing, f"{path}:{name}")
        return cast(T, thing)

    def _check_runs(self, thing: Any, name: str) -> None:
        if not self._awaits:
            check_runs(thing, f"{self.key} = {name}")


def _modules(package: str) -> list[str]:
    """List the modules of a package's folder without importing them."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return sorted(module.name for module in pkgutil.iter_modules(folders))


def _import_file(path: str) -> ModuleType:
    """Import the file as a module, once as long as it does not change: a check and a run have the same classes."""
    with open(path, "rb") as f:
        source = f.read()
    place = os.fsencode(os.path.abspath(path))
    name = f"megarl_user_{hashlib.blake2b(place + source, digest_size=8).hexdigest()}"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = path
        sys.modules[name] = module  # dataclasses and pickle look a class's module up there
        try:
            import_ = _importer(os.fsdecode(place))
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
            with torch_as_before():
                exec(compile(source, path, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _importer(path: str) -> Callable[..., Any]:
    """Make an `__import__` for a file: it finds the other files of the folder by name, and nobody else finds them.

    `sys.path` stays as it is: a `json.py` beside a reward must be nothing that a library imports. Nor does a file find
    itself: an `agents.py` imports the package of that name.
    """

    loaded: dict[str, ModuleType] = {}  # a file that changes while the program runs is not imported again

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        file = os.path.join(os.path.dirname(path), f"{name}.py")
        known = name in loaded or name in sys.stdlib_module_names or file == path
        if level == 0 and not known and os.path.isfile(file):
            loaded[name] = _import_file(file)
        if level == 0 and name in loaded:
            return loaded[name]
        return builtins.__import__(name, globals, locals, fromlist, level)

    return import_

"""Runs tests against a program that another process runs: the program sees what is asked of it, and no test.

What the program answers is data. Where a test compares an object of the program with a value of its own, nothing of the
program decides:

- `==` and `in` go by data; an object that holds none is equal to no value.
- `object - 3` must give an object that is no number: `abs(f(x) - 3) < 1e-6` is then no test that the object passes.
  Of its attributes, those that numbers, dates and arrays have can be taken, and its text, only if the test itself has
  called its class.
- of what a function returned, methods that answer yes or no about text, numbers and sets are not asked, and what it
  holds is what it was seen to hold first (`megarl.isolation.contents`).

What a test makes itself, by calling a class whose name has a capital, has all its methods; its `==` with a value goes
by data all the same, and its arithmetic with one gives no number.
"""

from __future__ import annotations

import _thread
import builtins
import sys

from megarl.isolation import names
from megarl.isolation.contents import LOOKS, Contents
from megarl.isolation.far import BINARY, CHANGEABLE, COMPARISONS, CONVERSIONS, SPECIAL, FarType, far_number
from megarl.isolation.plain_values import YES_OR_NO, import_module, json_reader
from megarl.isolation.remote import Peer

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from typing import Any

_FUNCTION, _BUILTIN = type(lambda: None), type(len)
_METHOD: Any = type(str.upper)
_ASKED = """
annotations bases cause class closure code context dataclass_fields dataclass_params defaults dict func kwdefaults
match_args members mro next notes self slots subclasses traceback wrapped
"""  # no hook of another library: numpy asks __array_function__ what is equal
_OF_VALUES = {name for kind in (complex, int, float, list, dict, set) for name in dir(kind) if name[:1] != "_"}
_OF_DATES_AND_ARRAYS = """
days seconds microseconds total_seconds year month day hour minute second date time timestamp utcoffset max min sum mean
all any std var item tolist ptp prod norm median argmax argmin argsort round dot trace abs normalize quantize as_tuple
adjusted copy_abs limit_denominator
"""
_OF_VALUES |= set(_OF_DATES_AND_ARRAYS.split())
_READS = "count index copy get keys values items union intersection difference symmetric_difference hex decode find"
_READING = YES_OR_NO | set(_READS.split())
_HARMLESS = LOOKS | COMPARISONS | {"__next__", "__str__", "__repr__", "__format__", "__hash__"}
_NUMERIC = "abs round int float complex index bool neg pos trunc floor ceil"
_OF_NUMBERS = {f"__{name}__" for name in _NUMERIC.split()}
_OF_FUNCTIONS = {"__name__", "__qualname__", "__doc__", "__module__"}
_OF_OBJECTS = _OF_FUNCTIONS | {f"__{name}__" for name in _ASKED.split()}
_DEEPEST = 5000


def run(tests: int, channel: int, paths: list[str]) -> tuple[list[bool], bool]:
    """Run tests; return which passed, with "whole" up to the first that did not, and whether the program has ended.

    Args:
        tests: descriptor of JSON: {"source", "tests", "subjects", "functions", "entry_point", "whole"}; "subjects" are
            names that lead to the program though Python has them too, "functions" those that nothing calls.
        paths: folders in front of `sys.path`.
        channel: descriptor of that to `megarl.isolation.answer.main`.
    """
    with open(tests, "rb") as f:
        examination = json_reader()(f.read().decode())
    sys.path[:0] = paths
    sys.setrecursionlimit(_DEEPEST)
    examiner = Examiner(channel)
    try:
        examiner.ask("load", examination["source"])
    except BaseException:
        return [False], examiner.broken
    space = Space(examiner, set(examination["subjects"]))
    passed: list[bool] = []
    for test in examination["tests"]:
        try:
            _run_one(test, space, examination["entry_point"], examination["functions"])
            passed.append(not examiner.broken)
        except BaseException:
            passed.append(False)
        if examiner.broken or (examination["whole"] and not passed[-1]):
            break
    return passed, examiner.broken


def _run_one(test: str, space: Space, entry_point: str | None, functions: list[str]) -> None:
    if "unittest" in test:
        import unittest

        unittest.main = lambda *_, **__: None  # type: ignore[assignment]
    before = set(map(id, space.values()))
    exec(compile(test, "test.py", "exec", dont_inherit=True), space)
    if entry_point is not None and callable(space.get("check")):
        space["check"](space[entry_point])
    new = {name: value for name, value in space.items() if id(value) not in before}
    if "unittest" in sys.modules:
        _run_cases(list(new.values()))
    for name in functions:
        if name in new:
            _run_as_pytest(new[name])


def _run_cases(values: list[Any]) -> None:
    import unittest

    for kind in values:
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == "__main__":
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
            assert result.wasSuccessful()


def _run_as_pytest(value: Any) -> None:
    """Run a test function, or each method of a class whose name says that it is a test."""
    if not isinstance(value, type):
        result = value()
        if hasattr(result, "__await__"):
            import_module("asyncio").run(result)
        return
    for name in vars(value):
        if name.startswith("test"):
            instance = value()
            getattr(instance, "setup_method", lambda: None)()
            _run_as_pytest(getattr(instance, name))


class Space(dict):  # `dict[str, Any]` would import typing
    """Holds the names of the tests; a name that they do not define leads to the program or to Python."""

    def __init__(self, examiner: Examiner, subjects: set[str]) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._examiner, self._subjects = examiner, subjects

    def __missing__(self, name: str) -> Any:
        if name not in self._subjects:
            if hasattr(builtins, name) or name.startswith("__"):
                raise KeyError(name)
            module = names.module_of(name)
            if name in names.OBJECTS:
                return getattr(import_module(names.OBJECTS[name]), name)
            if module is not None:
                return import_module(module)
        try:
            value = self._examiner.ask("name", name)
        except NameError:
            raise KeyError(name) from None
        return value if name[:1].isupper() else self._examiner.as_function(value)


class Examiner(Peer):
    """Asks the program for the tests, on their side of the channel."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._asking = _thread.RLock()  # tests may have threads
        self._function: Any = None
        self._lent: set[int] = set()
        self._called: set[int] = set()  # numbers of the program's classes that the tests called
        self._contents: dict[int, Contents] = {}  # by number of the object

    def as_function(self, value: Any) -> Any:
        """Return the value of a name without a capital; even a class can only be called, like a function."""
        if type(value) is not FarType:
            return value
        if self._function is None:
            self._function = self._types.kind([-1, "function", [-1], ["__call__"], "type"])
        return self.far(value._far_number, self._function)

    # ------------------------------------------------------------------------------------------ what is asked

    def ask(self, operation: str, *operands: Any) -> Any:
        with self._asking:
            if operation in ("call", "set", "del", "await") or (
                operation == "special" and operands[0] not in _HARMLESS
            ):
                self._contents.clear()  # the program may have changed its objects
            return super().ask(operation, *operands)

    def make(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._called.add(kind._far_number)
        value = self.ask("call", kind, args, kwargs)
        is_new = isinstance(type(value), FarType) and not kind._far_listed
        return self._again(value, made=True) if is_new else value

    def attribute(self, far: Any, name: str) -> Any:
        if name in _READING and hasattr(_plain_type(far), name) and not far._far_made:
            return getattr(self._seen(far).plain, name)
        if name in YES_OR_NO and (isinstance(far, FarType) or not far._far_made):
            raise AttributeError(f"{name} of an object that the program returned")
        if name[:2] == name[-2:] == "__" and name not in _OF_OBJECTS:
            raise AttributeError(name)
        if name in _OF_VALUES and self._is_doubtful(far):
            raise AttributeError(f"{name} of what the program computed with a value of the test")
        if isinstance(far, FarType) or far._far_made:
            return self.ask("get", far, name)
        return self._seen(far).attribute(name)

    def _is_doubtful(self, far: Any) -> bool:
        """Tell whether the program computed an object with a value of the test, which has not called its class."""
        kind: Any = type(far)
        return isinstance(kind, FarType) and far._far_computed and kind._far_number not in self._called

    def _seen(self, far: Any) -> Contents:
        return self._contents.setdefault(far._far_number, Contents(self, far))

    def operate(self, name: str, far: Any, operands: tuple[Any, ...]) -> Any:
        if far._far_computed and name in (_OF_NUMBERS if far._far_made else CONVERSIONS):
            raise TypeError(f"{name} of what the program computed with a value of the test")
        if name in COMPARISONS or name in BINARY:
            return self._with_two(name, far, operands[0])
        if name in ("__str__", "__repr__", "__format__") and self._is_doubtful(far):
            raise TypeError("text of what the program computed with a value of the test")
        if name in LOOKS and not far._far_made:
            return self._seen(far).look(name, *operands)
        if name == "__exit__":
            return self._leave(far, *operands)
        if name == "__format__" and far._far_computed and operands[0]:
            raise TypeError("a number of what the program computed with a value of the test")
        return self.ask("special", name, far, *operands)

    def _with_two(self, name: str, far: Any, other: Any) -> Any:
        both_far = isinstance(type(other), FarType)
        if hasattr(type(far), "_far_base") and not (both_far and far._far_made):
            if both_far and hasattr(type(other), "_far_base"):
                other = self._seen(other).plain
            plain = self._seen(far).plain
            return getattr(type(plain), name, lambda *_: NotImplemented)(plain, other)
        if name in COMPARISONS:
            if not both_far:
                return NotImplemented
            if name == "__eq__" and far._far_number == other._far_number:
                return True
            answer = self.ask("special", name, far, other)
            return answer if type(answer) is bool else NotImplemented
        answer = self.ask("special", name, far, other)
        if answer is NotImplemented or (both_far and not (far._far_computed or other._far_computed)):
            return answer
        if isinstance(type(answer), FarType):
            return self._again(answer, made=far._far_made, computed=True)
        if not far._far_made or hasattr(type(answer), "__abs__"):
            raise TypeError(f"{name} of an object of the program and a value of the test gives no object")
        return answer

    def _leave(self, far: Any, kind: Any, error: Any, trace: Any) -> bool:
        """End a `with` on an object of the program, which cannot swallow an exception that the test itself raised."""
        its_own = error is None or far_number(error) is not None
        swallowed = self.ask("special", "__exit__", far, *((kind, error, None) if its_own else (None, None, None)))
        return its_own and swallowed is True

    def _again(self, value: Any, *, made: bool = False, computed: bool = False) -> Any:
        """Make another stand-in for the same object."""
        return self.far(value._far_number, type(value), made=made, computed=computed)

    def far(self, number: int, kind: Any, base: str = "", *, made: bool = False, computed: bool = False) -> Any:
        value = super().far(number, kind, base, made=made, computed=computed)
        if kind.__name__ != "coroutine":
            return value

        async def run() -> Any:
            return self.ask("await", value)

        return run()

    # ------------------------------------------------------------------------------------------ what is answered

    def give(self, value: Any) -> Any:
        kind = type(value)
        if far_number(value) is None and not isinstance(value, BaseException):
            reference = _of_library(value)
            if reference is not None:
                return {"g": reference}
            if not (_is_tests(value) or callable(value) or hasattr(kind, "__next__")):
                raise TypeError(f"a value of type {kind.__name__} cannot be handed to the program")
        if far_number(value) is None:
            self._lent.add(self.number(value))
        return super().give(value)

    def own(self, number: int) -> Any:
        value = super().own(number)
        if number not in self._lent and not _is_tests(value):
            raise ValueError("an object that was not given")
        return value

    def do(self, operation: str, operands: list[Any]) -> Any:
        if operation == "call":
            function, args, kwargs = operands
            return self._lent_function(function)(*args, **kwargs)
        if operation == "special":
            name, value, *rest = operands
            if name == "__call__":
                return self._lent_function(value)(*rest[0], **rest[1])
            if name not in SPECIAL:
                raise TypeError(name)
            if name == "__next__" or _is_tests(value) or name in ("__iter__", "__str__", "__repr__", "__hash__"):
                return getattr(type(value), name)(value, *rest)
        if operation in ("get", "set"):
            value, name, *content = operands
            function = callable(value) and not _is_tests(value)
            of_object = _is_tests(value) and not name.startswith("_") and name not in ("format", "format_map")
            if not (name in _OF_FUNCTIONS if function else of_object):
                raise AttributeError(name)
            in_class = _in_class(value, name)
            if content and (isinstance(value, type) or callable(in_class)):
                raise AttributeError(f"{name} is the test's")
            if isinstance(value, type) and in_class is None:  # a method of its metaclass, such as ABC.register
                raise AttributeError(name)
            return setattr(value, name, *content) if content else getattr(value, name)
        raise TypeError(f"{operation} of a value of the tests")

    def _lent_function(self, function: Any) -> Any:
        """Return a function that was lent; any other raises TypeError: `type` makes objects that are equal to all."""
        if self._numbers.get(id(function)) not in self._lent:
            raise TypeError("a call of what was not given")
        return function


def _is_tests(value: Any) -> bool:
    """Tell whether a value is a class of the tests, or an instance of one; functions are neither."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == "__main__"


def _in_class(value: Any, name: str) -> Any:
    """Return what an object's class, or a class itself, has by that name; None: nothing."""
    kind = value if isinstance(value, type) else type(value)
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _plain_type(far: Any) -> Any:
    """Return which of Python's changeable classes an object's class comes from; `type`: none."""
    return CHANGEABLE.get(getattr(type(far), "_far_base", ""), type)


def _of_library(value: Any) -> list[str] | None:
    """Return module and name of a class or function that the program's Python has too; None: it has no such."""
    if not isinstance(value, (type, _FUNCTION, _BUILTIN, _METHOD)):
        return None
    if isinstance(value, _METHOD):
        return [value.__objclass__.__module__, f"{value.__objclass__.__qualname__}.{value.__name__}"]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module.partition(".")[0] not in sys.stdlib_module_names or module == "__main__":
        return None
    return [module, name] if getattr(sys.modules.get(module), name, None) is value else None

"""Reads tests: finds the names that lead to the program under test, and the functions that are to be run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megarl.isolation.names import CONSTANTS, OBJECTS, is_pythons, module_of

_AROUND = {"abs", "all", "any", "bool", "dict", "float", "int", "isinstance", "len", "list", "print", "range", "repr"}
_AROUND |= {"round", "set", "sorted", "str", "tuple", "type"}
_IDLE = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass, ast.Global, ast.Nonlocal)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Subjects(NamedTuple):
    """Holds names that tests use.

    Attributes:
        subjects: the names that lead to the program though Python has them too: `sum` in "assert sum(10, 15) == 6".
        functions: functions and classes of the tests that are called as pytest calls them, since nothing else does.
    """

    subjects: list[str]
    functions: list[str]


def subjects_of(tests: Sequence[str], entry_point: str | None) -> Subjects:
    """Find the names in tests that lead to the program, and the functions to be called.

    Raises:
        ValueError: nothing in the tests names anything of the program, or what does is not run.
    """
    trees = [ast.parse(test) for test in tests]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = set(_bound(nodes))
    if entry_point is not None and "check" in bound:
        return Subjects([entry_point], [])
    in_front = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = loaded - bound
    used = in_front | {name for node in nodes if isinstance(node, ast.Call) for name in _used_in(node)}
    subjects = {name for name in free if not _library(name, used, in_front)}
    subjects |= _alone_in_asserts(nodes, bound)
    if not subjects:
        subjects = _named_alone(trees, free)
    if not subjects:
        raise ValueError("needs tests in column 'tests' that call something of the program: these name nothing of it")
    statements = [statement for tree in trees for statement in _statements(tree.body)]
    functions = [node.name for node in statements if _is_pytest(node) and node.name not in loaded]  # type: ignore[attr-defined]
    if not _reached(statements, functions, subjects):
        raise ValueError(
            "needs tests in column 'tests' that run: these only define functions, which nothing calls, or what runs "
            "asks nothing of the program"
        )
    return Subjects(sorted(name for name in subjects if is_pythons(name)), functions)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those within `if`, `try`, loops and `with` among them."""
    for statement in body:
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, [])]
        inner += [part for handler in getattr(statement, "handlers", []) for part in handler.body]
        if inner and not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            yield from _statements(inner)
        yield statement


def _is_pytest(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") and not node.bases and any(map(_is_pytest, node.body))
    if not isinstance(node, _FUNCTIONS) or not node.name.startswith("test"):
        return False
    taken = [*node.args.posonlyargs, *node.args.args]
    return all(parameter.arg == "self" for parameter in taken[: len(taken) - len(node.args.defaults)])


def _reached(statements: Sequence[ast.stmt], functions: Sequence[str], subjects: set[str]) -> bool:
    """Tell whether the statements that run come to a name of the program, by way of names that the tests define."""
    given: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for name in _bound([statement] if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) else ast.walk(statement)):
            given.setdefault(name, []).append(statement)
    classes = [node for node in statements if isinstance(node, ast.ClassDef)]
    cases = [node for node in classes if _is_case(node, given) and any(map(_is_pytest, node.body))]
    running = [
        node for node in statements if not isinstance(node, (*_IDLE, *_FUNCTIONS, ast.ClassDef)) and not _is_text(node)
    ]
    unseen = [*running, *cases, *(node for name in functions for node in given[name])]
    seen: set[int] = set()
    while unseen:
        node = unseen.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for name in _loaded_in(node):
            if name in subjects:
                return True
            unseen += given.get(name, [])
    return False


def _loaded_in(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement reads; a block's statements are looked at by themselves."""
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        block = isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)) and node is statement
        nodes += [
            part
            for part in ast.iter_child_nodes(node)
            if not (block and isinstance(part, (ast.stmt, ast.excepthandler)))
        ]


def _is_case(node: ast.ClassDef, given: Mapping[str, Sequence[ast.stmt]]) -> bool:
    """Tell whether a class comes from `unittest.TestCase`."""
    if any("TestCase" in ast.unparse(base) for base in node.bases):
        return True
    bases = [base for name in node.bases if isinstance(name, ast.Name) for base in given.get(name.id, [])]
    return any(isinstance(base, ast.ClassDef) and base is not node and _is_case(base, given) for base in bases)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _alone_in_asserts(nodes: Sequence[ast.AST], bound: set[str]) -> set[str]:
    """Find names of Python's modules that asserts ask about alone: `compress` in "assert compress('aab') == 'a2b'".

    A name that stands around one of the program, or of the tests, in another assert is Python's.
    """
    alone, around = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Assert):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            modules = {
                part.func.id
                for part in ast.walk(node)
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
            }
            modules = {name for name in modules - bound if name in OBJECTS and name not in CONSTANTS}
            others = {name for name in names - modules if not hasattr(builtins, name)}
            if others or len(modules) > 1:
                around |= modules
            else:
                alone |= modules
    return alone - around


def _library(name: str, used: set[str], in_front: set[str]) -> bool:
    """Tell whether a name is Python's; `log` in "assert log == [1]" is not the logarithm."""
    module = module_of(name) is not None and name in in_front
    return module or hasattr(builtins, name) or (name in OBJECTS and (name in used | CONSTANTS or name[0].isupper()))


def _used_in(call: ast.Call) -> Iterator[str]:
    """Yield the names that a call names: the function's, and those of arguments."""
    for node in (call.func, *call.args, *(keyword.value for keyword in call.keywords)):
        if isinstance(node, ast.Name):
            yield node.id


def _named_alone(trees: list[ast.Module], free: set[str]) -> set[str]:
    """Find the name that is meant where Python has them all: the innermost of a module, else the outermost built-in."""
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(node, node.func.id) for node in calls if isinstance(node.func, ast.Name) and node.func.id in free]
    of_modules = [(node, name) for node, name in named if name in OBJECTS]
    known = {id(node) for node, _ in of_modules}
    inner = {name for node, name in of_modules if known.isdisjoint(id(part) for part in list(ast.walk(node))[1:])}
    if inner:
        return inner
    names = [name for _, name in named if name not in _AROUND] or [name for _, name in named]
    return set(names[:1])


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that the tests themselves define."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name

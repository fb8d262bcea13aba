"""Which names in tests lead to the program under test, found by reading the tests."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

from megarl.isolation.names import CONSTANTS, OBJECTS, is_pythons, module_of

_AROUND = {"abs", "all", "any", "bool", "dict", "float", "int", "isinstance", "len", "list", "print", "range", "repr"}
_AROUND |= {"round", "set", "sorted", "str", "tuple", "type"}
_IDLE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


def subjects_of(tests: Sequence[str], entry_point: str | None) -> list[str]:
    """The names that lead to the program though Python has them too: `sum` in "assert sum(10, 15) == 6".

    Raises:
        ValueError: nothing in the tests names anything of the program, or they only define what nobody calls.
    """
    trees = [ast.parse(test) for test in tests]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = set(_bound(nodes))
    called = entry_point is not None and "check" in bound
    if not called and all(_idle(statement) for tree in trees for statement in tree.body):
        raise ValueError("needs tests in column 'tests' that run: these only define functions, which nothing calls")
    if called:
        assert entry_point is not None
        return [entry_point]
    in_front = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    free = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - bound
    used = in_front | {name for node in nodes if isinstance(node, ast.Call) for name in _used_in(node)}
    own = {name for name in free if not _library(name, used, in_front)}
    if not own:
        own = _named_alone(trees, free)
    if not own:
        raise ValueError("needs tests in column 'tests' that call something of the program: these name nothing of it")
    return sorted(name for name in own if is_pythons(name))


def _library(name: str, used: set[str], in_front: set[str]) -> bool:
    """Whether it is Python's; `log` in "assert log == [1]" is not the logarithm."""
    module = module_of(name) is not None and name in in_front
    return module or hasattr(builtins, name) or (name in OBJECTS and (name in used | CONSTANTS or name[0].isupper()))


def _used_in(call: ast.Call) -> Iterator[str]:
    """Names that are called, and arguments."""
    for node in (call.func, *call.args, *(keyword.value for keyword in call.keywords)):
        if isinstance(node, ast.Name):
            yield node.id


def _named_alone(trees: list[ast.Module], free: set[str]) -> set[str]:
    """The name meant where Python has all of them: the innermost of a module's, else the outermost of its own."""
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(node, node.func.id) for node in calls if isinstance(node.func, ast.Name) and node.func.id in free]
    of_modules = [(node, name) for node, name in named if name in OBJECTS]
    known = {id(node) for node, _ in of_modules}
    inner = {name for node, name in of_modules if known.isdisjoint(id(part) for part in list(ast.walk(node))[1:])}
    if inner:
        return inner
    names = [name for _, name in named if name not in _AROUND] or [name for _, name in named]
    return set(names[:1])


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that the tests themselves give."""
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


def _idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ClassDef):
        return not any("TestCase" in ast.unparse(base) for base in statement.bases)
    return isinstance(statement, _IDLE) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )

"""Answers <calc>12*7</calc> by 84."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from megarl.environments.environment import Turn, blocks

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_LONGEST, _LARGEST = 200, 10**30  # characters; above the products of short numbers


class Calculator:
    """Answers the last <calc> of a response; a response without one ends the episode.

    Args:
        answer: the observation, with the result for {result}.
    """

    def __init__(self, *, answer: str = "{result}") -> None:
        if "{result}" not in answer:
            raise ValueError("answer must hold {result}")
        self._answer = answer

    def reset(self, row: Mapping[str, Any]) -> None:
        del row

    def step(self, response: str) -> Turn:
        expressions = blocks(response, "calc")
        if not expressions:
            return Turn(done=True)
        try:
            result = str(evaluate(expressions[-1]))
        except ValueError as e:
            result = str(e)
        return Turn(observation=self._answer.replace("{result}", result))

    def close(self) -> None:
        pass


def evaluate(expression: str) -> Number:
    """Compute the value of an expression of numbers, + - * / // % and brackets.

    Raises:
        ValueError: the expression is anything else, divides by zero, or has too large a value.
    """
    if len(expression) > _LONGEST:
        raise ValueError("error: too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError as e:
        raise ValueError("error: division by zero") from e
    except (SyntaxError, RecursionError, MemoryError, OverflowError) as e:
        raise ValueError("error: no arithmetic") from e


def _value(node: ast.expr) -> Number:
    value: Number
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    else:
        raise ValueError("error: no arithmetic")
    if not abs(value) < _LARGEST:
        raise ValueError("error: too large")
    return value

"""Guards tasks of reasoning-gym that evaluate text: they are given text written anew from what a small grammar reads.

Some tasks hand a response, or a part of the row, to Python's `eval` or to sympy's `parse_expr`, which is `eval` too.
They are given the response only if it is a literal or a formula of a few operations and functions; what they see is
written from the parsed tree, so that "1_0", a comment or a string with code in it is not there any more.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]
"""The row as a verifier takes it: question, answer, metadata."""

Guard = Callable[[str, Entry], "str | None"]
"""(response, entry) -> the text that the verifier is given; None: the response scores 0."""

_LONGEST = 5_000  # characters; deeper than the parser goes is refused by it
_DIGITS = 40  # of a number in a formula
_POWER = 64  # an exponent at most
_FUNCTION_NAMES = "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log sqrt Abs erf"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_NAME = re.compile(r"[A-Za-z]|pi")
_SIGNS: tuple[type[ast.AST], ...] = (ast.UAdd, ast.USub)
_FOUR: tuple[type[ast.AST], ...] = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_BITWISE: tuple[type[ast.AST], ...] = (
    *(ast.Add, ast.Sub, ast.Mult),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift),
)
_HEX = re.compile(r"(?:0x[0-9a-f]{1,400}|\d{1,400}|<<|>>|[-+*&|^()\s])*", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,2})?|[-+]?\d{1,400}\s*/\s*\d{1,400}")


_COMPLEX = re.compile(r"(?:[-+.0-9ij()\s]|(?<=[0-9.])e[-+]?[0-9]{1,2}(?![0-9])){1,200}", re.IGNORECASE)


class Refused(Exception):
    """Raised for text that the grammar does not have."""


def _tree(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise Refused
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        raise Refused from e


def _literal(text: str) -> str:
    """Rewrite a list or tuple of numbers, texts, and lists of them; raises Refused for other text."""

    def check(value: object, depth: int) -> None:
        if isinstance(value, list | tuple) and depth:
            for item in value:
                check(item, depth - 1)
        elif not isinstance(value, str | int | float) or isinstance(value, bool):
            raise Refused

    try:
        value = ast.literal_eval(_tree(text))
    except (ValueError, TypeError, MemoryError, RecursionError) as e:
        raise Refused from e
    if not isinstance(value, list | tuple):
        raise Refused
    check(value, 3)
    return repr(value)


def _formula(text: str) -> str:
    """Rewrite a formula of whole numbers and decimals, letters, the four operations, bounded powers, and functions of
    one argument; raises Refused for other text."""
    tree = _tree(text)
    _check_formula(tree)
    try:
        return ast.unparse(tree)
    except RecursionError as e:
        raise Refused from e


def _check_formula(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if not math.isfinite(number) or len(repr(number)) > _DIGITS:
                raise Refused
        case ast.Name(id=name) if _NAME.fullmatch(name):
            pass
        case ast.UnaryOp(op=op, operand=operand) if isinstance(op, _SIGNS):
            _check_formula(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            _check_formula(left)
            _check_exponent(left, right)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _FOUR):
            _check_formula(left)
            _check_formula(right)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            _check_formula(argument)
        case _:
            raise Refused


def _check_exponent(base: ast.expr, exponent: ast.expr) -> None:
    """Refuse exponents except small numbers, and formulas over a letter, which no power makes long: no 9**(9**9)."""
    try:
        if abs(_value(exponent)) > _POWER:
            raise Refused
        return
    except (Unknown, ZeroDivisionError):
        pass
    _check_formula(exponent)
    if not isinstance(base, ast.Name):
        raise Refused


class Unknown(Exception):
    """Raised for a formula that is no number."""


def _value(node: ast.expr) -> Fraction:
    """Compute the number that a formula is, exactly; raises Unknown for letters, powers and functions."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and math.isfinite(number):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _FOUR):
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Add):
                return a + b
            if isinstance(op, ast.Sub):
                return a - b
            return a * b if isinstance(op, ast.Mult) else a / b
    raise Unknown


def _sum_of_whole_numbers(text: str) -> ast.expr:
    """Parse the four operations on whole numbers; raises Refused for anything else."""
    tree = _tree(text)
    _check_formula(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Call | ast.Pow) or (
            isinstance(node, ast.Constant) and not isinstance(node.value, int)
        ):
            raise Refused
    return tree


# ------------------------------------------------------------------------------------------------- responses


def _list(response: str, entry: Entry) -> str | None:
    right = entry["metadata"].get("valid_answers", [entry["answer"]])
    return response if response in right or response.strip() in right else _literal(response)


def _countdown(response: str, entry: Entry) -> str | None:
    return ast.unparse(_sum_of_whole_numbers(response))


def _puzzle24(response: str, entry: Entry) -> str | None:
    """Accept the row's four numbers if they make 24: the task takes any four numbers, and 24.5 for 24."""
    tree = _sum_of_whole_numbers(response)
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if sorted(used) != sorted(entry["metadata"]["numbers"]) or _value(tree) != 24:  # type: ignore[type-var]
        return None
    return ast.unparse(tree)


def _of_variable(response: str, entry: Entry) -> str | None:
    return _formula(response)


def _numbers(response: str, entry: Entry) -> str | None:
    """Accept finite numbers alone: NaN is neither more nor less than any number, and passes the task's comparisons."""
    values = json.loads(response.replace("'", '"'))
    if not isinstance(values, list) or not all(math.isfinite(float(value)) for value in values):
        return None
    return response


def _complex(response: str, entry: Entry) -> str | None:
    """Accept complex numbers without NaN, for which the task pays in full."""
    return response if _COMPLEX.fullmatch(response) else None


def _truth(response: str, entry: Entry) -> str | None:
    """Accept the row's answer alone: the task compares the truth of texts, and any text is true."""
    text = response.strip().rstrip(".").casefold()
    return str(entry["answer"]) if text == str(entry["answer"]).casefold() else None


def _probability(response: str, entry: Entry) -> str | None:
    """Accept a probability within 0.0001 and 1 %: the task pays for the first digits, "0", and for anything within
    0.0001 of a small one."""
    text = response.strip().replace(",", "")
    if not _NUMBER.fullmatch(text):
        return None
    expected, off = Fraction(entry["answer"]), abs(Fraction(text.replace(" ", "")) - Fraction(entry["answer"]))
    return text if off <= Fraction(1, 10_000) and off <= expected / 100 else None


def _conclusion(response: str, entry: Entry) -> str | None:
    """Refuse premises, alone or joined: they follow from themselves, and the task pays for them in full."""
    metadata, formula = entry["metadata"], _without_brackets(response)
    example, premises = metadata["example_answer"], metadata["premises"]
    if formula == _without_brackets(example):
        return response
    most = max(2, sum(map(str.isupper, example)))
    restated = formula in map(_without_brackets, premises) and len(formula) > 1
    return None if restated or sum(map(str.isupper, formula)) > most else response


def _without_brackets(formula: str) -> str:
    return "".join(character for character in formula if character not in "() ")


GUARDS: dict[str, Guard] = {
    "binary_matrix": _list,
    "n_queens": _list,
    "spiral_matrix": _list,
    "string_insertion": _list,
    "countdown": _countdown,
    "puzzle24": _puzzle24,
    "intermediate_integration": _of_variable,
    "polynomial_multiplication": _of_variable,
    "simple_integration": _of_variable,
    "coin_flip": _probability,
    "complex_arithmetic": _complex,
    "game_of_life_halting": _truth,
    "number_sorting": _numbers,
    "propositional_logic": _conclusion,
}
"""Task -> its guard."""


def guarded(task: str, response: str, entry: Entry) -> str | None:
    """Return what the task's verifier is given for a response; None: it scores 0, and the verifier is not called."""
    guard = GUARDS.get(task)
    if guard is None:
        return response
    try:
        return guard(response, entry)
    except (Refused, ValueError, TypeError, OverflowError, ZeroDivisionError, RecursionError, MemoryError):
        return None


# ------------------------------------------------------------------------------------------------------ rows


def _bits(text: str) -> None:
    """Refuse text other than whole numbers, hexadecimal too, and operations on their bits."""

    def check(node: ast.expr) -> None:
        match node:
            case ast.Constant(value=int()):
                pass
            case ast.UnaryOp(op=op, operand=operand) if isinstance(op, (*_SIGNS, ast.Invert)):
                check(operand)
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BITWISE):
                check(left)
                check(right)
            case _:
                raise Refused

    if not _HEX.fullmatch(text):
        raise Refused
    check(_tree(text))


EVALUATED: dict[str, tuple[str, Callable[[str], object]]] = {
    "bitwise_arithmetic": ("metadata.problem", _bits),
    "intermediate_integration": ("metadata.integrand", _formula),
    "number_sorting": ("answer", _literal),
    "polynomial_multiplication": ("answer", _formula),
    "simple_integration": ("metadata.integrand", _formula),
}
"""Task -> what of its rows it evaluates, and the grammar of that."""


def refusal(task: str, entry: Entry) -> str:
    """Say why a row is not given to its task, which would evaluate it; empty if it may be."""
    column, check = EVALUATED.get(task, ("", None))
    if check is None:
        return ""
    value = entry["answer"] if column == "answer" else entry["metadata"].get(column.removeprefix("metadata."))
    try:
        if not isinstance(value, str):
            raise Refused
        check(value)
    except (Refused, RecursionError):
        return f"{task} evaluates {column}, and {value!r:.80} is not what it may evaluate"
    return ""

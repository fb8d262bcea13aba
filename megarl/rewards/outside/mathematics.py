"""Calls math-verify, and with it latex2sympy and sympy.

Only the reading of LaTeX is used: what math-verify does with other text ends in sympy's `parse_expr`, which is `eval`.
"""

from __future__ import annotations

import math
import re
from typing import Any

_OF_EACH_KIND = (
    ("1", "x = 1"),
    ("1", "\\frac{1}{2}"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("[1,2)", "(1,\\sqrt{2})"),
    ("\\{1\\}", "two"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
)
"""One of each kind of answer. The library builds something when it first reads a kind, in up to 0.4 s."""


_LETTER = re.compile(
    r"\\(?:begin|end|text|mathrm|textbf|textit|textrm|mathbf|mathbb|mbox|operatorname)\s*\{[^{}]*\}|\\(?:[A-Za-z]+|.)|"
    r"(?P<letter>[A-Za-z])"
)
_DECIMALS = 6  # that the library compares
_MOST_DECIMALS = 100


def prepare() -> None:
    """Import the library, and read an answer of each kind."""
    import logging

    logging.disable(logging.CRITICAL)  # a line for each expression that it cannot read
    for reference, response in _OF_EACH_KIND:
        answer({"reference": reference, "response": response})


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer {"reference": LaTeX, "response": LaTeX} with {"score": 1.0 if the library finds them equal, else 0.0}."""
    from math_verify import verify

    try:
        reference, response = map(_read, _told_apart(request["reference"], request["response"]))
        equal = verify(reference, response, timeout_seconds=None)
        if equal and (digits := _decimals(reference, response)) > _DECIMALS:
            equal = verify(reference, response, digits, digits + 9, timeout_seconds=None)
        return {"score": float(bool(equal))}
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
        return {"score": 0.0}


def _told_apart(*texts: str) -> list[str]:
    """Write another letter for each capital that stands beside its small one: to the library they are the same."""
    sets = [{match["letter"] for match in _LETTER.finditer(text)} - {None} for text in texts]
    capitals = {letter for letters in sets for letter in letters if letter.isupper() and letter.lower() in letters}
    free = sorted(set("abcghjklmnopqrstuvwxyz") - {letter.lower() for letters in sets for letter in letters})
    if len(capitals) > len(free):
        raise ValueError("more letters than there are")
    others = dict(zip(sorted(capitals), free, strict=False))
    return [_LETTER.sub(lambda match: others.get(match[0], match[0]), text) for text in texts]


def _decimals(*read: list[Any]) -> int:
    """Count the decimals that the smallest number needs for six digits: the library takes 0.0 for 10^{-9}."""
    from sympy import Basic, MatrixBase, preorder_traversal

    values = [value for values in read for value in values]
    parts = [part for value in values for part in (value.flat() if isinstance(value, MatrixBase) else [value])]
    nodes = [node for part in parts if isinstance(part, Basic) for node in preorder_traversal(part)]
    sizes = [abs(complex(node)) for node in nodes if getattr(node, "is_number", False) and node.is_finite]
    smallest = min([1.0, *(size for size in sizes if size)])
    return min(_DECIMALS - 1 - math.floor(math.log10(smallest)), _MOST_DECIMALS)


def _read(latex: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig()]
    return parse(f"$\\boxed{{{latex}}}$", extraction_config=config, parsing_timeout=None)  # SIGALRM stops no C code

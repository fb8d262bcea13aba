"""Writes values of reasoning-gym's rows as JSON, and reads them back exactly.

Verifiers compare with what their task generated: arc_agi's tuples are never equal to the lists that JSON makes of them.
What JSON carries stays as it is; anything else becomes an object with a tag: (1, 2) is
{"python": "tuple", "is": [1, 2]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_TAG, _VALUE = "python", "is"

_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}


def encode(value: Any) -> Any:
    """Return the JSON that `decode` makes into `value` again, type for type; numpy's scalars become Python's.

    Raises:
        ValueError: a type that neither JSON nor this module knows.
    """
    numpy = sys.modules.get("numpy")  # not imported for this: workers begin without it, and without its threads
    if numpy is not None and isinstance(value, numpy.generic):  # np.str_("Amelia") compares as "Amelia" does
        value = value.item()
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value) and not {_TAG, _VALUE} <= value.keys():
            return {key: encode(item) for key, item in value.items()}
        return {_TAG: "dict", _VALUE: [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        items = [encode(item) for item in value]
        if kind is not tuple:  # a set's order changes from process to process: the same rows must give the same file
            items.sort(key=json.dumps)
        return {_TAG: kind.__name__, _VALUE: items}
    if kind is Fraction:
        return {_TAG: "Fraction", _VALUE: str(value)}
    raise ValueError(f"no JSON for a value of type {kind.__module__}.{kind.__qualname__}: {value!r:.80}")


def decode(value: Any) -> Any:
    """Return the value that `encode` was given.

    Raises:
        ValueError: a tag that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_TAG, _VALUE}:
        return {key: decode(item) for key, item in value.items()}
    kind, content = value[_TAG], value[_VALUE]
    try:
        if kind == "Fraction":
            return Fraction(content)
        return _FROM_ITEMS[kind](decode(content))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise ValueError(f"{value!r:.80} is no value that tools/prepare_reasoning_gym.py writes") from e

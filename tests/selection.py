"""Which variations of a test the quick selection runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *places: int) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, of which all are slow tests but those at these places, from 0."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=[] if i in places else [pytest.mark.slow])
        for i, case in enumerate(cases)
    ]

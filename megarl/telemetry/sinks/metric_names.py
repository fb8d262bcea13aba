"""Makes metric names for services that allow fewer characters. Different metrics get different names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable


class Names:
    """Maps metric names to a service's names.

    Data sources may be called `gsm-8k` and `gsm_8k`, or `数学`. A name that would equal an earlier one, or that loses
    letters, gets a part of its checksum.

    Args:
        allowed: replaces the characters that the service does not allow.
    """

    def __init__(self, allowed: Callable[[str], str]) -> None:
        self._allowed = allowed
        self._given: dict[str, str] = {}

    def of(self, metrics: Iterable[str]) -> dict[str, str]:
        """Map each metric to its name at the service. A name never changes between calls."""
        new = sorted(name for name in metrics if name not in self._given)
        used = set(self._given.values())
        for name in new:
            short = self._allowed(name)
            if short in used or not name.isascii():
                short = f"{short}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
            used.add(short)
            self._given[name] = short
        return {name: self._given[name] for name in metrics}

"""What services with fewer characters call metrics, each by a name of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable


class Names:
    """A name that a service would not tell from an earlier one, or that loses letters, gets a part of its checksum.

    Sources of data may be called `gsm-8k` and `gsm_8k`, or `数学`.

    Args:
        allowed: a metric's name -> the same in the service's characters.
    """

    def __init__(self, allowed: Callable[[str], str]) -> None:
        self._allowed = allowed
        self._given: dict[str, str] = {}

    def of(self, metrics: Iterable[str]) -> dict[str, str]:
        """The service's name of each metric; that of an earlier call stays."""
        new = sorted(name for name in metrics if name not in self._given)
        taken = set(self._given.values())
        for name in new:
            given = self._allowed(name)
            if given in taken or not name.isascii():
                given = f"{given}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
            taken.add(given)
            self._given[name] = given
        return {name: self._given[name] for name in metrics}

"""Measures the speed of an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.types import Rollout


@dataclass(kw_only=True)
class Speed:
    """Counts tokens and seconds of a rank's calls of the engine since the last `collect`.

    Attributes:
        ranks: that generate.
        tokens: that the policy drew, on all ranks.
        seconds: from the first request until all ranks had all responses.
        latencies: seconds from the first request until a response was finished, of those that this rank tells of.
    """

    ranks: int
    tokens: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    _began: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a call of the engine."""
        self._began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - self._began

    def finished(self) -> None:
        """Note that a response is finished, within `measured`."""
        self.latencies.append(time.perf_counter() - self._began)

    def count(self, before: Sequence[Rollout], after: Sequence[Rollout]) -> None:
        """Count the tokens that were drawn between two states of the same rollouts."""
        self.tokens += sum(map(_drawn, after)) - sum(map(_drawn, before))

    def collect(self) -> Speed:
        """Return the counts, and count anew."""
        taken = Speed(ranks=self.ranks, tokens=self.tokens, seconds=self.seconds, latencies=self.latencies)
        self.tokens, self.seconds, self.latencies = 0, 0.0, []
        return taken


def _drawn(rollout: Rollout) -> int:
    return len(rollout.response) - rollout.response.observed_count

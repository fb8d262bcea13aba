"""Names a node that works longer than the others, from the times that its ranks measure themselves.

A step is as slow as its slowest node. Times spent waiting for all ranks do not count; those inside the collectives of a
pass do, which makes a slow node look better than it is, not worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median_low

STEPS = 5
"""Steps in a row in which a node is slow before it is named."""
SHARE = 0.25
"""How much longer than the median node a slow one works."""


class SlowNode:
    """Compares the nodes after each step; every rank computes the same from the same times."""

    def __init__(self, ranks_per_node: int) -> None:
        self._per_node = ranks_per_node
        self._slow: list[list[float]] = []  # excess of the nodes that are slow now, by step

    def after_step(self, work: Sequence[Mapping[str, float]], hosts: Sequence[str]) -> tuple[dict[str, float], str]:
        """Return the metrics of a step, and a line the first time in which a node was slow for several steps in a row.

        Args:
            work: of each rank, seconds by phase, without what it waited for others.
            hosts: of each rank.
        """
        totals = [sum(of_rank.values()) for of_rank in work]
        nodes = [mean(totals[i : i + self._per_node]) for i in range(0, len(totals), self._per_node)]
        middle = median_low(nodes)
        if len(nodes) < 2 or middle <= 0.0:
            return {}, ""
        excess = [seconds / middle - 1.0 for seconds in nodes]
        slowest = max(range(len(nodes)), key=excess.__getitem__)
        self._slow = [*self._slow[-STEPS:], excess]
        metrics = {"straggler/node": float(slowest), "straggler/node_excess": excess[slowest]}
        named = [node for node in range(len(nodes)) if self._is_new(node)]
        if not named:
            return metrics, ""
        node = max(named, key=excess.__getitem__)
        share = mean(step[node] for step in self._slow[-STEPS:])
        return metrics, (
            f"{hosts[node * self._per_node]} (node {node}) worked {share:.0%} longer than the median node in the last "
            f"{STEPS} steps, and all others wait for it: compare its clocks and temperatures, or run without it"
        )

    def _is_new(self, node: int) -> bool:
        """Tell whether a node has now been slow for so many steps, and was not so before."""
        slow = [step[node] > SHARE for step in self._slow]
        return len(slow) >= STEPS and all(slow[-STEPS:]) and (len(slow) == STEPS or not slow[-STEPS - 1])

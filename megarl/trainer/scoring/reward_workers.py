"""Chooses the number of processes that score responses on each rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Host:
    """Describes the machine that a rank runs on.

    Attributes:
        scores: whether responses are scored on this rank.
        cores: the CPU cores that it may use.
        quota: the cores' worth of time that its container gets; None: no limit.
    """

    name: str
    scores: bool
    cores: frozenset[int]
    quota: float | None = None


def host_here(*, scores: bool) -> Host:
    """Return the machine of this process."""
    name, cores = socket.gethostname(), frozenset(os.sched_getaffinity(0))
    return Host(name=name, scores=scores, cores=cores, quota=_quota())


def workers_of(rank: int, hosts: Sequence[Host], per_node: int | None) -> int:
    """Return how many workers a rank has: its share of its node's, at least 1; 0 where nothing is scored.

    The node's are `per_node`, or as many as the ranks there have cores: of 2 ranks that share cores 0 to 7 each has 4.

    Args:
        hosts: of all ranks, in their order.
    """
    if not hosts[rank].scores:
        return 0
    here = [i for i, host in enumerate(hosts) if host.name == hosts[rank].name]
    if per_node is None:
        per_node = len(frozenset[int]().union(*(hosts[i].cores for i in here)))
        quotas = [quota for i in here if (quota := hosts[i].quota) is not None]
        per_node = min([per_node, *(int(quota) for quota in quotas)])
    scoring = [i for i in here if hosts[i].scores]
    share, rest = divmod(per_node, len(scoring))
    return max(1, share + (scoring.index(rank) < rest))


def _quota() -> float | None:
    """Return the CPU limit of this process's control group, in cores."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as f:
            limit, period = f.read().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None

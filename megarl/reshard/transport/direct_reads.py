"""Agrees which ranks read each other's memory directly: both ends of every pair come to the same answer.

All learn which rank could not open an offer, and why. An owner must not send what another rank reads directly, and must
send all else: a pair that disagrees would wait for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megarl.parallel.megatron_internals import default_store

Pair = tuple[int, int]
"""Source rank and the rank that takes from it, global."""

Opened = TypeVar("Opened")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Offers a rank's memory to others, for reading.

    Attributes:
        host: identity of its machine.
        handles: with which processes of that machine open its memory, by number.
        places: of each parameter by name: number of the memory, and offset in it, bytes.
        refusal: why there is nothing; empty if there is.
    """

    host: str
    handles: tuple[bytes, ...] = ()
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Says who reads whose memory, the same on all ranks of the group.

    Attributes:
        direct: pairs of which the second reads the first's memory.
        refused: why other pairs of the same host do not.
    """

    direct: frozenset[Pair]
    refused: dict[Pair, str]


def agree(
    offer: Offer, sources: Collection[int], open_: Callable[[int, Offer], Opened], group: dist.ProcessGroup
) -> tuple[Agreement, dict[int, Opened]]:
    """Open what `sources` offer to this rank. Every rank of the group calls it.

    Args:
        sources: ranks from which this one takes.
        open_: makes a source's offer readable; raises OSError if it is not.

    Returns:
        the agreement, and the offers opened here, by source.
    """
    ranks = dist.get_process_group_ranks(group)
    offers: dict[int, Offer] = dict(zip(ranks, _all_gather(offer, group), strict=True))
    opened: dict[int, Opened] = {}
    refused: dict[int, str] = {}
    for source in sources:
        if offers[source].host != offer.host:
            continue
        try:
            if offers[source].refusal:
                raise OSError(offers[source].refusal)
            opened[source] = open_(source, offers[source])
        except OSError as e:
            refused[source] = str(e)
    everyone = dict(zip(ranks, _all_gather((set(opened), refused), group), strict=True))
    agreement = Agreement(
        direct=frozenset((source, taker) for taker, (readable, _) in everyone.items() for source in readable),
        refused={(source, taker): why for taker, (_, all_why) in everyone.items() for source, why in all_why.items()},
    )
    return agreement, opened


def host_identity() -> str:
    """Identify the processes that can share memory: of one machine since it was started, and of one container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def first_in_job(what: str) -> bool:
    """Return True once in a job for each `what`, on the rank that asks first."""
    return default_store().add(f"megarl/{what}", 1) == 1


def _all_gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out

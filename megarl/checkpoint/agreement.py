"""Local work that may fail on one rank: all ranks learn of it together, so that none waits for one that gave up."""

from __future__ import annotations

from collections.abc import Callable
from socket import gethostname
from typing import TypeVar

import torch.distributed as dist

from megarl.checkpoint.manifest import one_line
from megarl.parallel.world import World

T = TypeVar("T")


class RankFailed(OSError):
    """Raised on every rank alike: what failed on the first of the ranks that could not do their part."""


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """Do this rank's work, which must not leave others waiting when it fails, and wait for theirs.

    Args:

    Raises:
        RankFailed: on all ranks, if the work ended in an OSError on any of them.
    """
    done: list[T] = []
    failure: Exception | None = None
    try:
        done.append(work())
    except Exception as e:
        failure = e
    said = first_of(world, None if failure is None else _failure(failure))
    if failure is not None and os_error(failure) is None:
        raise failure  # a fault of the program: this rank shows where
    if said is not None:
        raise RankFailed(said)
    return done[0]


def first_of(world: World, said: str | None) -> str | None:
    """What the first of the ranks with something to say says; the same on every rank."""
    everything = world.all_gather(said, "all ranks at a checkpoint")
    return next((one for one in everything if one is not None), None)


def _failure(error: Exception) -> str:
    cause = os_error(error) or error
    return (
        str(cause) if isinstance(cause, RankFailed) else f"{one_line(cause)} (rank {dist.get_rank()}, {gethostname()})"
    )


def os_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an error: torch's zip writer raises a RuntimeError of its own over it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error

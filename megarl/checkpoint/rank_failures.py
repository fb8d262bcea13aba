"""Tells all ranks of a failure on one of them at the same time, so that none waits for a rank that left."""

from __future__ import annotations

from collections.abc import Callable
from socket import gethostname
from typing import TypeVar

from megarl.checkpoint.manifest import one_line
from megarl.parallel.world import World

T = TypeVar("T")


class RankFailed(OSError):
    """Names, on every rank alike, the failure of the first rank that could not do its part."""


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """Do this rank's work, which waits for no other rank, and wait until all ranks have done theirs.

    Raises:
        RankFailed: on all ranks, if the work ended in an OSError on any of them.
    """
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except Exception as e:
        failure = e
    problem = first_of(world, None if failure is None else _line(failure, world))
    if failure is not None and os_error(failure) is None:
        raise failure  # a fault of the program: this rank shows where
    if problem is not None:
        raise RankFailed(problem)
    return results[0]


def on_first_rank(world: World, work: Callable[[], T]) -> T | None:
    """Do work on the first rank alone while the others wait; returns its result there.

    Raises:
        RankFailed: as in `on_every_rank`.
    """

    def part() -> T | None:
        return work() if world.rank == 0 else None

    return on_every_rank(world, part)


def first_of(world: World, text: str | None) -> str | None:
    """Choose the text of the first rank that has one; the same on every rank."""
    texts = world.all_gather(text, "all ranks at a checkpoint")
    return next((text for text in texts if text is not None), None)


def os_error(error: BaseException | None) -> OSError | None:
    """Find the OSError behind an error: torch's zip writer raises a RuntimeError of its own over it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _line(error: Exception, world: World) -> str:
    cause = os_error(error) or error
    return str(cause) if isinstance(cause, RankFailed) else f"{one_line(cause)} (rank {world.rank}, {gethostname()})"

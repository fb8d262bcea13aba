"""Moves the roles' memory on and off the GPU as a step goes through its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.parallel.offload import Resident
from megarl.phases import Item, Phase, away


class Residency:
    """The memory of all roles of a run, by the table of `megarl.phases`.

    Entering a phase gives back what the table says is away in it, and begins to bring back what it does not. The roles
    wait for what they touch, so that a flow which enters no phase is slower, and right.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, Item, Resident]] = []

    def add(self, role: str, memory: Mapping[Item, Sequence[Resident]]) -> None:
        """The memory of a role, under the name that the table knows it by."""
        self._held += [(role, item, part) for item, parts in memory.items() for part in parts]

    def enter(self, phase: Phase, keep: Sequence[Resident] = ()) -> None:
        """Every rank calls it.

        Args:
            keep: stays, whatever the table says: a model under any name may be the one that an engine answers for.
        """
        leaving = [part for role, item, part in self._held if phase in away(role, item) and part not in keep]
        for part in leaving:
            part.release()
        for _, _, part in self._held:
            if part not in leaving:
                part.prefetch()

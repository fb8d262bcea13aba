"""Moves the roles' memory on and off the GPU as a step goes through its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.parallel.offload import Resident
from megarl.phases import Item
from megarl.role_kinds import RoleKind


class Residency:
    """Holds the memory of all roles of a run, by their kinds.

    Entering a phase releases the memory that a role's kind keeps off the GPU in it, and begins to bring back the rest.
    The roles wait for the memory they touch, so that a flow which enters no phase is slower, but right.
    """

    def __init__(self) -> None:
        self._held: list[tuple[frozenset[str], Resident]] = []

    def add(self, kind: RoleKind, memory: Mapping[Item, Sequence[Resident]]) -> None:
        """Add the memory of a role of that kind."""
        self._held += [(kind.without(item), part) for item, parts in memory.items() for part in parts]

    def enter(self, phase: str, keep: Sequence[Resident] = ()) -> None:
        """Begin a phase. Every rank calls it.

        Args:
            keep: memory that stays, whatever its kind: the reshard may read the weights of any role.
        """
        leaving = [part for absent, part in self._held if phase in absent and part not in keep]
        for part in leaving:
            part.release()
        for _, part in self._held:
            if part not in leaving:
                part.prefetch()

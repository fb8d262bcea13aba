"""Keeps the numbers of running sequences in arrays, so that a decode step takes the host no loop over sequences."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOKEN, POSITION, SLOT, BLOCK, SEED, DRAWN = range(6)
"""Columns of a decode step's rows: the newest token, its position, slot and block, the request's seed, and the number
of tokens drawn before."""
COLUMNS = 6

ON_DEVICE = -1
"""In place of a token that the device has drawn itself, for the slot."""

WINDOW = 256
"""Tokens of a slot that wait to be appended to their response."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Is the input of a decode step.

    Attributes:
        table: int64 [rows, COLUMNS].
        entries: the number of the entry with which each row's sequence holds its slot.
        kinds: how each row's token is drawn, see `Scheduler.kinds`.
    """

    table: Ints
    entries: Ints
    kinds: Ints

    def __len__(self) -> int:
        return len(self.table)


class Slots:
    """Has a row of numbers for each slot, and hands slots out.

    Attributes:
        rows: int64 [slots, COLUMNS], of the next decode step.
        room: tokens that the sequence's blocks hold.
        most: tokens of the whole response.
        kind, stop_ids: numbers of how tokens are drawn, and of the stop tokens.
        has_stop_strings: whether the text is looked at.
    """

    def __init__(self, count: int) -> None:
        self.rows = np.zeros((count, COLUMNS), dtype=np.int64)
        self.room, self.most, self.kind, self.stop_ids = (np.zeros(count, dtype=np.int64) for _ in range(4))
        self.has_stop_strings = np.zeros(count, dtype=bool)
        self._entry, self._entries = np.full(count, -1, dtype=np.int64), 0
        self._new_ids = np.zeros((count, WINDOW), dtype=np.int32)
        self._new_logp = np.zeros((count, WINDOW), dtype=np.float32)
        self._new = np.zeros(count, dtype=np.int64)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Hand out a slot; whoever takes it sets its numbers."""
        slot = self._free.pop()
        self._entry[slot], self._entries, self._new[slot] = self._entries, self._entries + 1, 0
        return slot

    def give_back(self, slot: int) -> None:
        self._entry[slot] = -1
        self._free.append(slot)

    def unfinished(self, slots: Ints) -> Ints:
        """Choose the slots whose responses have fewer tokens than they may, those that are being drawn included."""
        return slots[self.rows[slots, DRAWN] < self.most[slots]]

    def full(self, slots: Ints) -> Ints:
        """Choose the slots whose next token has no room in the blocks that are there."""
        return slots[self.rows[slots, POSITION] == self.room[slots]]

    def next_rows(self, slots: Ints) -> Rows:
        """List the rows of a decode step; those after it go on from the tokens that this one draws."""
        rows = Rows(table=self.rows[slots], entries=self._entry[slots], kinds=self.kind[slots])
        self.rows[slots, TOKEN] = ON_DEVICE
        self.rows[slots, POSITION] += 1
        self.rows[slots, DRAWN] += 1
        return rows

    def still_there(self, rows: Rows) -> NDArray[np.bool_]:
        """Tell for each row whether its sequence has not left its slot since."""
        there: NDArray[np.bool_] = self._entry[rows.table[:, SLOT]] == rows.entries
        return there

    def append(self, slots: Ints, ids: NDArray[np.int32], logp: NDArray[np.float32]) -> Ints:
        """Note a token of each slot; returns the slots that have no room for another until `pop`."""
        places = self._new[slots]
        self._new_ids[slots, places], self._new_logp[slots, places] = ids, logp
        self._new[slots] += 1
        return slots[places + 1 == WINDOW]

    def pop(self, slot: int) -> tuple[array[int], array[float]]:
        """Take the tokens that were noted, and their log-probabilities."""
        new, self._new[slot] = self._new[slot], 0
        return array("i", self._new_ids[slot, :new].tobytes()), array("f", self._new_logp[slot, :new].tobytes())

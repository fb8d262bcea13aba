"""Holds what is learnt from answers of the data: one sequence, or a better and a worse one. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass

Turns = tuple[tuple[int, ...], ...]
"""Token ids of a sequence in turns: the first, third ... are only read, the second, fourth ... are learnt. A prompt
with its answer has two."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Holds the sequences that one row of the data teaches.

    Attributes:
        sequences: one, or two: the chosen first, then the rejected. Each begins with a turn of one token or more that
            is only read, and ends with one that is learnt.
        label: the margin of a pair; 1 for an answer that is desirable, 0 for one that is not.
        source: file and line of the row, "train.jsonl:17", for messages.
    """

    sequences: tuple[Turns, ...]
    label: float = 0.0
    source: str = ""

    @property
    def tokens(self) -> int:
        """Count the tokens of all sequences."""
        return sum(len(turn) for turns in self.sequences for turn in turns)

    @property
    def contents(self) -> bytes:
        """Return what a digest covers: token ids, pairs and label; of one prompt and answer the ids alone."""
        first, *more = self.sequences
        return json.dumps([*self.sequences, self.label] if more or self.label else first).encode()

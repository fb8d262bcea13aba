"""Makes the token sequences on which models are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megarl.models.architecture import Architecture
from megarl.types import Batch, batch_of

ANSWER = 8
"""Tokens of a greedy answer."""
_LENGTHS = (5, 16, 33)
_LONGEST_WINDOW = 1024
"""Tokens; a longer sliding window is not filled."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Holds random token ids; the first token of a sequence is its prompt."""

    tokens: tuple[tuple[int, ...], ...]

    @cached_property
    def batch(self) -> Batch:
        """Pack the sequences, one after another."""
        return batch_of([ids[:1] for ids in self.tokens], [ids[1:] for ids in self.tokens], range(len(self.tokens)))

    @property
    def count(self) -> int:
        """Count the tokens, prompts included."""
        return sum(map(len, self.tokens))

    @property
    def prompts(self) -> list[list[int]]:
        """Take the sequences as prompts, without what leaves no room for an answer."""
        return [list(ids) for ids in self.tokens]


def sequences_for(arch: Architecture) -> Sequences:
    """Draw a few short sequences, and one that is longer than the model's sliding windows."""
    windows = {getattr(layer.attention, "sliding_window", None) or 0 for layer in arch.kinds}
    longer = [window + 9 for window in windows if 0 < window <= _LONGEST_WINDOW]
    most = max(2, arch.max_position_embeddings - ANSWER)
    generator = torch.Generator().manual_seed(0)
    lengths = (min(n, most) for n in (*_LENGTHS, *sorted(longer)))
    rows = (torch.randint(arch.vocab_size, (n,), generator=generator).tolist() for n in lengths)
    return Sequences(tokens=tuple(tuple(row) for row in rows))

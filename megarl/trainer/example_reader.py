"""Reads the examples of a step, each on one rank: a row is tokenised once, not once for every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megarl.data.example_batch import batch_of_examples
from megarl.data.example_set import fits_of
from megarl.data.examples import Example
from megarl.data.prompt_sampler import Fits
from megarl.data.row_files import RowRefused, RowsChanged
from megarl.parallel.world import World
from megarl.types import Batch
from megarl.types.owners import Owners

T = TypeVar("T")


class ExampleReader:
    """Has each row read by one rank, which tells the others what a table of sequences holds of it.

    Args:
        examples: the same on every rank.
    """

    def __init__(self, examples: Sequence[Example], world: World) -> None:
        self._examples, self._world = examples, world

    @property
    def fits(self) -> Fits | None:
        """Return a function that tells a sampler, the same on every rank, which rows are not too long; None if none is
        too long. It raises RowRefused on every rank if a row cannot be used."""
        fits = fits_of(self._examples)
        if fits is None:
            return None
        return lambda rows: self._on_one_rank_each(rows, fits, "which rows are too long")

    def batch(self, rows: Sequence[int]) -> Batch:
        """Join examples into a batch, whose tokens are with the ranks that have read them; every rank calls it.

        Raises:
            RowRefused: on every rank, if a row cannot be used, or is no longer what it was.
        """
        own: list[Example] = []

        def lengths_and_labels(rows: Sequence[int]) -> list[tuple[list[int], float]]:
            own.extend(self._examples[row] for row in rows)
            return [([sum(map(len, turns)) for turns in example.sequences], example.label) for example in own]

        table = self._on_one_rank_each(rows, lengths_and_labels, "examples that other ranks read")
        lengths = torch.tensor([lengths for lengths, _ in table], dtype=torch.int64)  # [examples, sequences of each]
        each = lengths.shape[1]
        readers = torch.tensor(list(rows), dtype=torch.int64) % self._world.size
        return batch_of_examples(own).with_(
            cu_seqlens=torch.cat((lengths.new_zeros(1), lengths.flatten().cumsum(0))),
            groups=torch.arange(len(table)).repeat_interleave(each),
            labels=torch.tensor([label for _, label in table], dtype=torch.float32).repeat_interleave(each),
            owners=Owners(
                block_of=readers.repeat_interleave(each),
                blocks=tuple((rank,) for rank in range(self._world.size)),
                ranks=self._world,
            ),
        )

    def _on_one_rank_each(self, rows: Sequence[int], read: Callable[[list[int]], Sequence[T]], what: str) -> list[T]:
        """Read each row on one rank, always the same; returns what is read of all rows, on every rank."""
        rank, size = self._world.rank, self._world.size
        results: Sequence[T] = []
        problem = ""
        try:
            results = read([row for row in rows if row % size == rank])
        except (RowRefused, RowsChanged) as e:
            problem = str(e)
        except Exception as e:  # of a tokenizer or a template: the other ranks wait
            problem = f"rank {rank} cannot read its rows of a step: {type(e).__name__}: {e}"
        of_ranks = self._world.all_gather((results, problem), what)
        if problem := next((problem for _, problem in of_ranks if problem), ""):
            raise RowRefused(problem)
        in_order = [iter(results) for results, _ in of_ranks]
        return [next(in_order[row % size]) for row in rows]

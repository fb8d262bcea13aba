"""Which rows make up the next batch; resumable."""

from __future__ import annotations

import numpy as np


class PromptSampler:
    """Batches of row positions, epoch after epoch; the rows left over at the end of an epoch are not used.

    The order is a function of (seed, epoch) alone, so epoch and position are the whole state.

    Args:
        n_rows: rows to draw from.
        batch_size: rows per batch.
        shuffle: a new order every epoch; false: always 0, 1, 2, ...

    Raises:
        ValueError: not even one batch.
    """

    def __init__(self, n_rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if batch_size > n_rows:
            raise ValueError(f"data.train_batch_size = {batch_size} exceeds the {n_rows} prompts of data.train_files")
        self._n_rows, self._batch_size, self._shuffle, self._seed = n_rows, batch_size, shuffle, seed
        self._start(epoch=0, position=0)

    @property
    def batches_per_epoch(self) -> int:
        return self._n_rows // self._batch_size

    def next(self) -> list[int]:
        """Positions of the next batch's rows."""
        if self._position + self._batch_size > self._n_rows:
            self._start(epoch=self._epoch + 1, position=0)
        start = self._position
        self._position += self._batch_size
        return [int(i) for i in self._order[start : self._position]]

    def state(self) -> dict[str, int]:
        """`epoch`, counted from 0, and `position`, rows of it already drawn."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: more rows were drawn than there are now: the data changed.
        """
        if state["position"] > self._n_rows:
            raise ValueError(
                f"the checkpoint had drawn {state['position']} rows of an epoch, but data.train_files now holds only "
                f"{self._n_rows}: resume with the data that the run began with"
            )
        self._start(epoch=state["epoch"], position=state["position"])

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.arange(self._n_rows)
        if self._shuffle:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._n_rows)

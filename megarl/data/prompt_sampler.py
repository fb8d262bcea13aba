"""Draws the rows of the next batch; resumable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.data.curriculum import Order
from megarl.data.row_files import RowRefused

_ORDER = {  # what the order of the prompts depends on: how it is called, and its part of a run in trainer.resume_allow
    "n_rows": ("rows of data.train_files", "data"),
    "shuffle": ("data.shuffle", "seed"),
    "batch_size": ("data.train_batch_size", "batch"),
    "seed": ("data.seed", "seed"),
}


MOST_TRIED = 10_000
"""Rows that are tried for one batch, or a hundred times its size: some 10 s."""


Fits = Callable[[Sequence[int]], Sequence[bool]]
"""Tells which of some rows can be used."""


class PromptSampler:
    """Draws batches of row positions, epoch after epoch; the rows left over at the end of an epoch are not used.

    The order is a function of (seed, epoch) alone, so epoch and position are the whole state of the same rows.

    Args:
        n_rows: rows to draw from.
        batch_size: rows per batch.
        shuffle: a new order every epoch; false: always 0, 1, 2, ...
        order: puts the rows of an epoch in another order than that.
        allow: parts of a run that may differ from where a state was taken, as in `trainer.resume_allow`.
        fits: which of some rows can be used; those that cannot are passed over. It gives the same for a row whenever it
            is asked. Default: all can.
        called: of `n_rows` and `batch_size`, for messages: the key, and its part of a run; default those of training.

    Raises:
        ValueError: fewer rows than a batch.
    """

    def __init__(
        self,
        n_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        order: Order | None = None,
        allow: Collection[str] = (),
        fits: Fits | None = None,
        called: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self._fits = fits
        self._called = {**_ORDER, **(called or {})}
        if batch_size > n_rows:
            (key, _), (rows, _) = self._called["batch_size"], self._called["n_rows"]
            raise ValueError(f"{key} = {batch_size} exceeds the {n_rows} {rows}")
        self._n_rows, self._batch_size, self._shuffle, self._seed = n_rows, batch_size, shuffle, seed
        self._allow, self._reordered = frozenset(allow), order
        self._start(epoch=0, position=0)

    def next(self) -> list[int]:
        """Draw the positions of the next batch's rows.

        Raises:
            RowRefused: of `MOST_TRIED` rows, or of those of a whole epoch, too few fit for one batch.
        """
        while True:
            if self._position + self._batch_size > self._n_rows:
                self._start(epoch=self._epoch + 1, position=0)
            begins, batch = self._position, self._fill()
            if len(batch) == self._batch_size:
                return batch
            tried = self._position - begins
            if begins == 0 or tried >= self._most_tried:
                raise RowRefused(self._too_few(tried, len(batch)))

    def _fill(self) -> list[int]:
        """Draw rows that fit until they are a batch, or until what is left of the epoch is too little for one."""
        batch: list[int] = []
        last = self._position + self._most_tried
        while self._position < last and len(batch) < self._batch_size <= len(batch) + self._n_rows - self._position:
            after = min(last, self._position + self._batch_size - len(batch))
            rows: list[int] = self._order[self._position : after].tolist()
            self._position += len(rows)
            fits = [True] * len(rows) if self._fits is None else self._fits(rows)
            batch += (row for row, usable in zip(rows, fits, strict=True) if usable)
        return batch

    @property
    def _most_tried(self) -> int:
        return max(MOST_TRIED, 100 * self._batch_size)

    def _too_few(self, tried: int, count: int) -> str:
        (key, _), (rows, _) = self._called["batch_size"], self._called["n_rows"]
        return (
            f"{key} = {self._batch_size} is more than the {rows} that keep to data.max_prompt_length and "
            f"data.max_response_length: {tried} of {self._n_rows} were tried, {count} do; raise a length, or "
            f"lower {key}"
        )

    def state(self) -> dict[str, Any]:
        """Return `epoch`, counted from 0, `position`, rows of it already drawn, and what the order depends on."""
        return {"epoch": self._epoch, "position": self._position, **self._depends_on()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; in another order, where that is allowed, with the next epoch.

        Raises:
            ValueError: what the order depends on differs from then: the position would be one in another order.
        """
        if not all(type(state.get(key)) is int and 0 <= state[key] < 2**53 for key in ("epoch", "position", *_ORDER)):
            raise ValueError("the checkpoint does not say where its data stood: resume with another one")
        changed = [key for key, now in self._depends_on().items() if state[key] != now]
        for key in changed:
            name, part = self._called[key]
            if part not in self._allow:
                raise ValueError(
                    f"the checkpoint was made with {name} = {state[key]}, now it is {self._depends_on()[key]}: resume "
                    f"with what the run began with, or set trainer.resume_allow=[{part}]"
                )
        if changed:
            self._start(epoch=state["epoch"] + 1, position=0)
            return
        self._start(epoch=state["epoch"], position=state["position"])

    def _depends_on(self) -> dict[str, Any]:
        values = (self._n_rows, int(self._shuffle), self._batch_size, self._seed)
        return dict(zip(_ORDER, values, strict=True))

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        if self._shuffle:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._n_rows)
        else:
            self._order = np.arange(self._n_rows)
        if self._reordered is not None:
            self._order = self._reordered(epoch, self._order)

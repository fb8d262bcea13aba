"""Draws batches from several files, each with its share; resumable."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.data.prompt_sampler import PromptSampler


class MixtureSampler(PromptSampler):
    """Draws batches of row positions, of which every file has its share at any time, to within one row.

    The next row is of the file that is furthest behind its share of all rows so far; with weights 3 and 1 the files are
    drawn as 0 0 1 0, 0 0 1 0, ... Each file is gone through in orders of its own, and begins anew when its rows have
    been drawn: none comes a second time before all of its file have come once. An epoch, as `trainer.total_epochs`
    counts them, is as many rows as all files have together, whichever they are.

    Args:
        sizes: rows of each file, 1 or more; the rows of one file follow those of the one before.
        weights: share of each, in any unit.

    The other arguments are those of `PromptSampler`.

    Raises:
        ValueError: fewer rows than a batch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        allow: Collection[str] = (),
        called: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        assert len(sizes) == len(weights) and 0 not in sizes
        # epochs, and what may not change
        super().__init__(sum(sizes), batch_size, shuffle, seed, allow=allow, called=called)
        self._files = [
            PromptSampler(size, 1, shuffle, seed + 1 + i, allow=("data", "seed")) for i, size in enumerate(sizes)
        ]
        self._starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self._shares = (np.asarray(weights) / sum(weights)).tolist()
        self._weights = list(weights)
        self._drawn = [0] * len(sizes)

    def next(self) -> list[int]:
        """Draw the positions of the next batch's rows."""
        super().next()
        return [self._one() for _ in range(self._batch_size)]

    def state(self) -> dict[str, Any]:
        """Return the state of `PromptSampler`, with rows drawn of each file, and where each stands."""
        return {
            **super().state(),
            "weights": self._weights,
            "drawn": list(self._drawn),
            "files": [file.state() for file in self._files],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. With other weights every file goes on where it stood, and the shares count
        anew; a file in another order, and all files where they are others, go on with an epoch that none has begun.

        Raises:
            ValueError: what the order depends on differs from then, and may not.
        """
        now, then = self.state(), state
        same_weights = then.get("weights") == now["weights"]
        sizes = [[file["n_rows"] for file in of.get("files", [])] for of in (now, then)]
        if not (same_weights and sizes[0] == sizes[1]) and "data" not in self._allow:
            raise ValueError(
                f"the checkpoint was made with data.weights = {then.get('weights', [])} of files with {sizes[1]} rows, "
                f"now they are {self._weights} and {sizes[0]}: resume with what the run began with, or set "
                f"trainer.resume_allow=[data]"
            )
        super().load_state({key: then[key] for key in super().state() if key in then})
        if sizes[0] != sizes[1]:
            begun = max((file["epoch"] for file in then.get("files", [])), default=-1)
            for file in self._files:
                file._start(epoch=begun + 1, position=0)
            return
        for file, its in zip(self._files, then["files"], strict=True):
            file.load_state(its)
        if same_weights:
            self._drawn = list(then["drawn"])

    def _one(self) -> int:
        total = sum(self._drawn) + 1
        behind = [share * total - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        file = behind.index(max(behind))
        self._drawn[file] += 1
        (place,) = self._files[file].next()
        start: int = self._starts[file]
        return start + place

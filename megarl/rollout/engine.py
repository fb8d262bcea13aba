"""What a generation engine is to the rest of the program: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megarl.types import Completion, SamplingParams

Share = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Tensor]]
"""Given the shapes of an engine's parameters by name, the tensors that some of them are to be.

The engine takes no memory for these. Whoever gave them keeps them where they are and up to date; the engine neither
writes to them nor releases them.
"""


def share_nothing(shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
    """An `Share`: all weights are the engine's own."""
    del shapes
    return {}


class Engine(Protocol):
    """One rank's part of a generation replica: a tensor-parallel group that holds one whole model.

    All ranks of a replica make the same calls with the same arguments, in the same order. Which memory is held after
    which call:

        after                        weights                    KV cache
        construction, sleep()        held                       given back
        sleep(release_weights=True)  given back                 given back
        wake(weights_only=True)      held                       as before
        wake()                       held                       held: ready to generate

    The values of released weights are lost: write them anew after waking. "Given back" is to the allocator of this
    process, so training can use it at once. Shared weights (`Share`) are always held.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Completes this replica's prompts; every rank of the replica returns the same.

        Args:
            prompts: token ids, one sequence per request; repeat a prompt to sample it several times.
            seeds: int64, one per request: the same seed, prompt and weights give the same completion.

        Raises:
            ValueError: a request that the engine cannot serve, with the reason in one line.
        """
        ...

    def parameters(self) -> dict[str, Tensor]:
        """The weights of this rank by name, as in `megarl.models.placements.engine_placements`.

        Resharding writes into those that are the engine's own, in place, each step; the tensor objects stay the same
        for the engine's life.
        """
        ...

    def wake(self, *, weights_only: bool = False) -> None:
        """Take memory: the weights, and unless `weights_only` the KV cache."""
        ...

    def sleep(self, *, release_weights: bool = False) -> None:
        """Give back the KV cache, and with `release_weights` the weights."""
        ...

    def close(self) -> None:
        """Give everything back, process groups included. No other call may follow."""
        ...

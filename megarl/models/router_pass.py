"""Keeps what a router needs to know of the micro-batch that goes through it, also where its layer is computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.models.architecture import Architecture
from megarl.parallel.train_groups import TrainGroups

T = TypeVar("T")


def routers_of(arch: Architecture, groups: TrainGroups, chunks: Sequence[Any]) -> dict[Any, dict[int, TopKRouter]]:
    """List the routers of each chunk of a model on this rank, by their layer's place among those with experts."""
    layout, at = groups.layout, groups.layout.coords(groups.world.rank)
    places = {layer: place for place, layer in enumerate(arch.expert_layers)}
    routers = {}
    for number, chunk in enumerate(chunks):
        mine = [places[i] for i in layout.layers(arch.num_layers, at.pp, number) if i in places]
        modules = (module for module in chunk.modules() if isinstance(module, TopKRouter))
        routers[chunk] = dict(zip(mine, modules, strict=True))
    return routers


class OfMicroBatch(Generic[T]):
    """Hands a router a value for each micro-batch, in the order of its calls.

    Without gradients a training pass keeps nothing but a layer's input: the layer is computed again, one micro-batch
    after the other in the same order, when others may have been through it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the values that a pass has left."""
        self._now: T | None = None
        self._again: deque[T] = deque()
        self._train = False

    def take(self, value: T, *, train: bool) -> None:
        """Hold the value of the micro-batch that goes through next.

        Args:
            train: a backward pass follows.
        """
        self._now, self._train = value, train

    def next(self) -> tuple[T | None, bool]:
        """Return the value for this call, None if nothing was taken, and whether the layer is computed again."""
        if self._again and torch.is_grad_enabled():
            return self._again.popleft(), True
        if self._now is not None and self._train and not torch.is_grad_enabled():
            self._again.append(self._now)
        return self._now, False

    @property
    def holds(self) -> bool:
        """Say whether a value was taken."""
        return self._now is not None

    @property
    def used_up(self) -> bool:
        """Say whether the layer was computed again for every micro-batch for which it had to be."""
        return not self._again

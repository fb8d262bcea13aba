"""Lets the routers of a model take the experts that the generation engine chose (arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.microbatch import MicroBatch, SequenceShard
from megarl.models.router_pass import OfMicroBatch, routers_of
from megarl.parallel.train_groups import TrainGroups
from megarl.parallel.upload import upload
from megarl.types import Batch

Best = Callable[..., tuple[Tensor, Tensor]]
"""(scores [T, experts], k, groups, groups per token) -> the values and numbers of each token's best experts, [T, k]."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Holds the experts of a micro-batch's tokens in one layer, on this rank.

    Attributes:
        experts: uint8 or int16 [T, experts_per_token].
        there: bool [T], the tokens whose experts were recorded; the others choose by themselves.
    """

    experts: Tensor
    there: Tensor


class RouterReplay:
    """Chooses experts for a router of Megatron-Core's, in place of its own RouterReplay.

    That one stands in a list of the whole process, in which the routers of several models could not be told apart.
    The router goes on from the numbers that it gets: it computes the experts' weights by its own rule, with gradients.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)
        """Recorded choices that the router would have made as well, and all."""
        self.recorded: OfMicroBatch[Recorded] = OfMicroBatch()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Best | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return values and numbers of each token's experts, as Megatron-Core's class of that name does."""
        assert default_compute_topk is not None
        if not self.recorded.holds:
            # without gradients Megatron-Core 0.19 leaves them in any order, in which their weights round otherwise
            with torch.enable_grad():
                return default_compute_topk(scores, topk, num_groups, group_topk)
        with torch.no_grad():
            _, best = default_compute_topk(scores, topk, num_groups, group_topk)
        recorded = self._next(best)
        experts = torch.where(recorded.there[:, None], recorded.experts.long(), best)
        return scores.gather(1, experts), experts

    def _next(self, best: Tensor) -> Recorded:
        """Find the experts for this call, and count those of a first computation."""
        recorded, again = self.recorded.next()
        assert recorded is not None
        if not again:
            there = recorded.there[:, None]
            same = (recorded.experts.long()[:, :, None] == best[:, None]).any(-1) & there
            self.counts = self.counts.to(same.device) + torch.stack((same.sum(), there.sum() * best.shape[1]))
        return recorded


class RoutingReplay:
    """Gives the routers of one model the experts of each micro-batch that goes through it.

    Args:
        chunks: of the model on this rank.
        shard: how ranks cut a micro-batch's tokens.
    """

    def __init__(self, arch: Architecture, groups: TrainGroups, chunks: Sequence[Any], shard: SequenceShard) -> None:
        self._device, self._shard = groups.world.device, shard
        self._tp_rank = groups.layout.coords(groups.world.rank).tp
        self._layers: dict[Any, range] = {}
        self._routers: dict[Any, list[RouterReplay]] = {}
        for chunk, routers in routers_of(arch, groups, chunks).items():
            mine = list(routers)
            self._layers[chunk] = range(mine[0], mine[-1] + 1) if mine else range(0)
            self._routers[chunk] = [RouterReplay() for _ in routers]
            for router, replay in zip(routers.values(), self._routers[chunk], strict=True):
                router.router_replay = replay
        self._batch: Batch | None = None
        self._train = False

    def begin(self, batch: Batch, *, train: bool) -> None:
        """Begin a pass over micro-batches of this batch; with none recorded, the routers choose by themselves."""
        self._batch, self._train = None if batch.routed_experts is None else batch, train
        for router in self._each_router:
            router.recorded.forget()
            router.counts = torch.zeros(2, dtype=torch.int64)

    def enter(self, chunk: Any, micro: MicroBatch) -> None:
        """Give the routers of a chunk the experts of the micro-batch that enters it."""
        layers, routers = self._layers[chunk], self._routers[chunk]
        if self._batch is None or not routers:
            return
        assert self._batch.routed_experts is not None and self._batch.routed is not None
        cells = micro.cells_of(self._shard, self._tp_rank)
        there = upload((cells >= 0) & self._batch.routed[cells], self._device)
        experts = upload(self._batch.routed_experts[:, layers.start : layers.stop][cells], self._device)
        for router, of_layer in zip(routers, experts.unbind(1), strict=True):
            router.recorded.take(Recorded(experts=of_layer, there=there), train=self._train)

    def end(self) -> None:
        """End the pass; the routers keep no micro-batch."""
        assert all(router.recorded.used_up for router in self._each_router)
        self._batch = None
        for router in self._each_router:
            router.recorded.forget()

    def counts(self) -> Tensor:
        """Count this rank's recorded choices of the last pass: those that training would have made as well, and all.

        Returns:
            int64 [2], on the host.
        """
        total = torch.zeros(2, dtype=torch.int64)
        for router in self._each_router:
            total = total.to(router.counts.device) + router.counts
        return total.cpu()

    @property
    def _each_router(self) -> Iterator[RouterReplay]:
        return (router for routers in self._routers.values() for router in routers)

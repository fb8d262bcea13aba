"""Groups the ranks that generate together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megarl.parallel.layout import GenerationLayout
from megarl.parallel.world import World


@dataclass(frozen=True, kw_only=True)
class GenerationGroups:
    """Holds the groups of this rank's generation replica.

    Attributes:
        tp: its ranks, which compute together; None where this rank is alone.
        control: the same ranks, over gloo.
    """

    world: World
    layout: GenerationLayout
    tp: dist.ProcessGroup | None
    control: dist.ProcessGroup | None

    @property
    def replica(self) -> int:
        """Number the replica."""
        return self.layout.coords(self.world.rank).replica

    @property
    def tp_rank(self) -> int:
        """Number this rank within the replica."""
        return self.layout.coords(self.world.rank).tp


def generation_groups(world: World, layout: GenerationLayout) -> GenerationGroups:
    """Create the groups of all replicas. Every rank calls it."""
    if layout.tp == 1:
        return GenerationGroups(world=world, layout=layout, tp=None, control=None)

    replicas = [layout.replica_ranks(i) for i in range(layout.replicas)]
    tp = world.new_groups(replicas)
    control = tp if world.device.type == "cpu" else world.new_groups(replicas, "gloo")
    return GenerationGroups(world=world, layout=layout, tp=tp, control=control)

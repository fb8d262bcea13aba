"""Brings a model's training weights into a generation engine."""

from __future__ import annotations

from megarl.config.policy import ReshardConfig
from megarl.models.weights import buffers
from megarl.reshard.execute import Resharder, ReshardStatistics
from megarl.reshard.plan import plan_reshard
from megarl.reshard.shared import SharedParameters
from megarl.reshard.sides import Side, blocks
from megarl.reshard.verify import verify as compare_ends
from megarl.roles.model import MegatronModel
from megarl.rollout.engine import Engine


class WeightSync:
    """Owns the plan that fills an engine's parameters from a model's, bit for bit.

    Attributes:
        shared: the engine's parameters that are the model's own, and need no move.
    """

    def __init__(
        self,
        model: MegatronModel,
        engine: Engine,
        target: Side,
        shared: SharedParameters,
        reshard: ReshardConfig,
    ) -> None:
        """Plan the moves. Every rank calls it, while the engine's weights are held.

        Args:
            target: describes the weights of the engines of all ranks.
        """
        self.shared, self._engine, self._always_verifies = shared, engine, reshard.verify
        self._verified = False
        world = model.groups.world
        plan = plan_reshard(model.side, target, world.rank, ranks_per_node=world.ranks_per_node)
        self.resharder = Resharder(
            plan.without(shared.places),
            model.parameters(),
            engine.parameters(),
            model.groups.group_in(blocks(model.side, target)),
            transport=reshard.transport,
            bucket_bytes=reshard.bucket_bytes,
            buffers=buffers(model.arch),
        )

    @property
    def statistics(self) -> ReshardStatistics:
        """Count what one reshard moves on this rank."""
        return self.resharder.statistics

    def run(self, *, verify: bool = False) -> None:
        """Write the model's weights into the engine's parameters; both are held, and every rank calls it.

        Args:
            verify: check every tensor afterwards, as is always done the first time.
        """
        self.shared.check(self._engine.parameters())
        self.resharder.run()
        if verify or self._always_verifies or not self._verified:
            compare_ends(self.resharder)
            self._verified = True

    def release(self) -> None:
        """Unmap the memory of other ranks, before the training weights are given back to the driver."""
        self.resharder.release()

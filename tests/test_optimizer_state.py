"""The optimizer's state in a checkpoint: each parameter's comes from the optimizer and the ranks that have it."""

from __future__ import annotations

import math
from copy import copy
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from training_cases import ARCH, Case, layout_of

from megarl.roles.optimizer_state import row_major_boxes


def _check_slots(optimizer: Any, *parameters: torch.nn.Parameter) -> None:
    """Each parameter's slot is in the one of the chained optimizers that steps it; of others there is none."""
    from megarl.roles.optimizer_state import Slots

    slots = Slots(optimizer)
    adams = [slot.adam for parameter in parameters if (slot := slots.of(parameter)) is not None]
    assert len(set(adams)) == len(adams)
    for parameter in parameters:
        if (slot := slots.of(parameter)) is not None:
            assert any(main is slot.main for group in slot.adam.param_groups for main in group["params"])
    with pytest.raises(AssertionError, match="no optimizer steps a parameter that is trained"):
        slots.of(torch.nn.Parameter(torch.ones(3)))


def _masters_written(distributed: bool) -> dict[str, list[float]]:
    """Fp32 weights that this rank writes of a dense parameter and of an expert's, which every second rank shares."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megarl.models.gpt import transformer_config
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World
    from megarl.roles.optimizer_state import sharded_optimizer_state
    from megarl.roles.writers import replicas_of, spread_over_replicas

    world = World()
    try:
        groups = train_groups(world, layout_of(Case(dp=4)))
        pgs, expert = copy(groups.pgs), world.rank % 2
        pgs.expt_dp = pgs.intra_expt_dp = [world.new_group(ranks) for ranks in ((0, 2), (1, 3))][expert]
        module = torch.nn.Module()
        module.dense = torch.nn.Parameter(torch.full((64,), 1.0))
        module.expert = torch.nn.Parameter(torch.full((64,), 2.0 + expert))
        module.expert.allreduce = False  # type: ignore[assignment]
        with groups.active():
            chunk = DistributedDataParallel(
                transformer_config(ARCH, groups, dtype=torch.float32, overrides={}),
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
                module,
                pg_collection=pgs,
            )
            config = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=distributed)
            optimizer = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False, pg_collection=pgs)
        _check_slots(optimizer, module.dense, module.expert)
        weights: dict[str, Any] = {}
        for name, offsets in (("dense", []), ("expert", [(0, expert, 2)])):
            parameter = getattr(module, name)
            replica = (0, 0, replicas_of(parameter, pgs).rank())
            weights[name] = ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica)
        spread = spread_over_replicas(weights, pgs)
        state = sharded_optimizer_state(optimizer, spread, loading=False)["state"]
        mains = [box for tensors in state.values() for box in tensors["main"].values() if not any(box.replica_id)]
        return {main.key: main.data.tolist() for main in mains}
    finally:
        leave_groups(world)


@pytest.mark.parametrize("distributed", [True, False])
def test_experts_on_different_ranks_are_not_added_up(ranks: Ranks, distributed: bool) -> None:
    written = ranks.run(4, _masters_written, distributed)
    dense, expert = "optimizer.main.dense", "optimizer.main.expert"
    assert list(chain(*(state.get(dense, []) for state in written))) == [1.0] * 64
    for number in range(2):
        assert list(chain(*(state.get(expert, []) for state in written[number::2]))) == [2.0 + number] * 64


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    boxes = list(row_major_boxes(shape, start, stop))
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
    assert [part.shape for part in parts] == [sizes for _, sizes in boxes] and len(boxes) < 2 * len(shape)
    assert torch.cat([part.flatten() for part in parts] or [whole.flatten()[:0]]).tolist() == list(range(start, stop))

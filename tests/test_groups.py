"""The torch-free rank arithmetic against the groups that Megatron-Core makes."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed import distributed_c10d
from training_cases import ARCH, WITH_EXPERTS, Case, actor_in, fixed_batch, update

from megarl.models.architecture import Architecture
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import GenerationLayout, TrainLayout, closest_stride


def _groups_of(train: TrainLayout, generation: GenerationLayout) -> dict[str, Any]:
    from megarl.parallel.generation_groups import generation_groups
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World

    before = len(dist.distributed_c10d._world.pg_map)
    world = World()
    groups, replica = train_groups(world, train), generation_groups(world, generation)
    found = {name: dist.get_process_group_ranks(getattr(groups.pgs, name)) for name in ("tp", "pp", "dp", "mp")}
    found["generation"] = dist.get_process_group_ranks(replica.tp) if replica.tp else [world.rank]
    found["everybody"] = world.all_gather(world.rank)
    found["most"] = world.maximum(world.rank)
    leave_groups(world)
    found["left"] = len(dist.distributed_c10d._world.pg_map) - before
    return found


@pytest.mark.parametrize(("tp", "pp", "dp", "gen_tp"), [(2, 2, 1, 4), (2, 1, 2, 2), (1, 2, 2, 1), (4, 1, 1, 2)])
def test_ranks_are_where_megatron_puts_them(ranks: Ranks, tp: int, pp: int, dp: int, gen_tp: int) -> None:
    world = tp * pp * dp
    train = TrainLayout(ranks=range(world), tp=tp, pp=pp)
    generation = GenerationLayout(ranks=range(world), tp=gen_tp, stride=closest_stride(train, gen_tp))
    for rank, found in enumerate(ranks.run(world, _groups_of, train, generation)):
        at = train.coords(rank)
        assert train.rank(tp=at.tp, dp=at.dp, pp=at.pp) == rank
        assert found["tp"] == [train.rank(tp=i, dp=at.dp, pp=at.pp) for i in range(tp)]
        assert found["pp"] == [train.rank(tp=at.tp, dp=at.dp, pp=i) for i in range(pp)]
        assert found["dp"] == [train.rank(tp=at.tp, dp=i, pp=at.pp) for i in range(dp)]
        assert tuple(found["mp"]) == train.model_ranks(rank)
        assert tuple(found["generation"]) == generation.replica_ranks(generation.coords(rank).replica)
        assert found["everybody"] == list(range(world))
        assert found["most"] == world - 1
        assert found["left"] == 0


def _order_of_leaving(train: TrainLayout, generation: GenerationLayout, second: TrainLayout) -> list[str]:
    from megarl.parallel.generation_groups import generation_groups
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World

    world = World()
    train_groups(world, train)
    generation_groups(world, generation)
    train_groups(world, second)
    left: list[str] = []
    destroy = dist.destroy_process_group

    def noted(group: dist.ProcessGroup) -> None:
        left.append(group.group_name)
        destroy(group)

    dist.destroy_process_group = noted
    try:
        leave_groups(world)
    finally:
        dist.destroy_process_group = destroy
    return left


def test_ranks_leave_the_groups_that_they_share_in_one_order(ranks: Ranks) -> None:
    """NCCL's communicators are left together."""
    layouts = (
        TrainLayout(ranks=range(4), tp=2, pp=2),
        GenerationLayout(ranks=range(4), tp=2),
        TrainLayout(ranks=range(4)),
    )
    found = ranks.run(4, _order_of_leaving, *layouts)
    for one in found:
        assert len(set(one)) == len(one) > 15
        for other in found:
            assert [name for name in one if name in other] == [name for name in other if name in one]


NAMES = ("tp", "pp", "dp", "mp", "embd", "expt_dp", "tp_ep_pp")


def _present() -> tuple[Any, ...]:
    """What Megatron-Core's functions say of the layout, whoever asks."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    pgs = ProcessGroupCollection.use_mpu_process_groups()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return (
        *(getattr(pgs, name) for name in NAMES),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
        {name: state.tolist() for name, state in tracker.items()},
    )


def _tracker_alone(train: TrainLayout) -> Any:
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World

    world = World()
    train_groups(world, train, seed=5)
    tracker = _present()[-1]
    leave_groups(world)
    return tracker


def _layouts_beside(first: TrainLayout, second: TrainLayout) -> dict[str, Any]:
    from megatron.core import parallel_state, tensor_parallel

    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World

    every = dist.distributed_c10d._world.pg_map
    before, tracker_alone = len(every), _tracker_alone(second)
    world = World()
    groups = train_groups(world, first)
    of_one, of_first, numbers = len(every), _present(), torch.get_rng_state()
    beside = train_groups(world, second, seed=5)
    of_both = len(every)
    assert torch.equal(torch.get_rng_state(), numbers) and _present() == of_first
    assert train_groups(world, second) == beside and train_groups(world, first) == groups
    assert len(every) == of_both > of_one

    with beside.active():
        of_second = _present()
        with beside.active(), groups.active():
            assert _present() == of_first
            with beside.active():
                assert _present() == of_second
        assert _present() == of_second
        with tensor_parallel.get_cuda_rng_tracker().fork():
            torch.rand(1)
        tracker, buffer = _present()[-1], parallel_state.get_global_memory_buffer()
    assert tracker != of_second[-1] == tracker_alone
    with groups.active():
        assert _present() == of_first and parallel_state.get_global_memory_buffer() is buffer
    with pytest.raises(ZeroDivisionError), beside.active():
        assert _present()[-1] == tracker  # it goes on where it was
        _ = 1 / 0
    assert _present() == of_first

    found = {name: dist.get_process_group_ranks(getattr(beside.pgs, name)) for name in ("tp", "pp", "dp", "mp")}
    found["sizes"] = of_second[len(NAMES) : -1]
    assert all(group is getattr(beside.pgs, name) for name, group in zip(NAMES, of_second, strict=False))
    leave_groups(world)
    found["left"] = len(every) - before
    return found


BESIDE = [
    (TrainLayout(ranks=range(4), tp=2, pp=2), TrainLayout(ranks=range(4))),
    (TrainLayout(ranks=range(4)), TrainLayout(ranks=range(4), pp=2, chunks=2)),
    (TrainLayout(ranks=range(4), tp=2, pp=2, chunks=2), TrainLayout(ranks=range(4), tp=4)),
]


@pytest.mark.parametrize(("first", "second"), BESIDE)
def test_a_layout_beside_another(ranks: Ranks, first: TrainLayout, second: TrainLayout) -> None:
    for rank, found in enumerate(ranks.run(4, _layouts_beside, first, second)):
        at = second.coords(rank)
        assert found["tp"] == [second.rank(tp=i, dp=at.dp, pp=at.pp) for i in range(second.tp)]
        assert found["pp"] == [second.rank(tp=at.tp, dp=at.dp, pp=i) for i in range(second.pp)]
        assert found["dp"] == [second.rank(tp=at.tp, dp=i, pp=at.pp) for i in range(second.dp)]
        assert tuple(found["mp"]) == second.model_ranks(rank)
        assert found["sizes"] == (at.tp, second.pp, second.chunks if second.chunks > 1 else None, at.dp)
        assert found["left"] == 0


def _time_limits(store: str) -> set[float]:
    """Seconds that each group of a run waits, also one whose maker names no limit."""
    from megarl.parallel.generation_groups import generation_groups
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World, init_distributed

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    host, port = store.split(":")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=host, MASTER_PORT=port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    defaults = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
    try:
        init_distributed(timeout_minutes=1.5)
        world = World()
        train_groups(world, TrainLayout(ranks=range(size), tp=2))
        generation_groups(world, GenerationLayout(ranks=range(size), tp=2))
        dist.new_group(backend="gloo")
        made = [group for group in distributed_c10d._world.pg_map if group.name() != "undefined"]
        limits = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made}
        assert len(made) > 5
        leave_groups(world)
    finally:
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = defaults
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            del os.environ[name]
    return limits


def test_every_group_has_the_run_s_time_limit(ranks: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(2, _time_limits, f"127.0.0.1:{store.port}") == [{90.0}, {90.0}]


def test_strided_replicas() -> None:
    train = TrainLayout(ranks=range(8), tp=4, pp=2)
    layout = GenerationLayout(ranks=range(8), tp=2, stride=closest_stride(train, 2))
    assert [layout.replica_ranks(i) for i in range(layout.replicas)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [layout.coords(rank).tp for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.coords(rank).replica for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [closest_stride(train, tp) for tp in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]


def test_every_layer_is_on_one_stage() -> None:
    for pp, chunks in ((1, 1), (4, 1), (2, 3), (4, 2)):
        layout = TrainLayout(ranks=range(pp), pp=pp, chunks=chunks)
        held = [layer for chunk in range(chunks) for stage in range(pp) for layer in layout.layers(24, stage, chunk)]
        assert held == list(range(24))
    assert list(TrainLayout(ranks=range(2), pp=2, chunks=2).layers(8, 1, 0)) == [2, 3]


@pytest.mark.parametrize(
    ("num_layers", "pp", "chunks", "held"),
    [
        (61, 16, 1, [3, 3, *[4] * 13, 3]),  # not the last stage, and the first one last
        (94, 4, 1, [23, 24, 24, 23]),
        (7, 4, 1, [2, 2, 2, 1]),
        (7, 2, 2, [2, 2, 2, 1]),  # chunks in the order of the model: stages 0, 1, 0, 1
        (9, 2, 2, [2, 2, 3, 2]),
        (4, 4, 1, [1, 1, 1, 1]),
    ],
)
def test_stages_differ_by_a_layer_at_most(num_layers: int, pp: int, chunks: int, held: list[int]) -> None:
    layout = TrainLayout(ranks=range(pp), pp=pp, chunks=chunks)
    parts = layout.all_layers(num_layers)
    assert [len(part) for part in parts] == held and [i for part in parts for i in part] == list(range(num_layers))
    assert parts[pp * (chunks - 1) + 1] == layout.layers(num_layers, 1, chunks - 1)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot be split into tensor x pipeline x context = 2 x 2 x 1"):
        TrainLayout(ranks=range(6), tp=2, pp=2)
    with pytest.raises(ValueError, match="use a rollout tensor_model_parallel_size that divides 6"):
        GenerationLayout(ranks=range(6), tp=4)


def _trained_and_forgotten(arch: Architecture, overlap: bool) -> list[str]:
    """What of a model and its optimizer is there once nobody has them."""
    with actor_in(Case(dp=2, config={"actor": {"megatron": {"overlap_grad_reduce": overlap}}}), arch) as actor:
        update(actor, fixed_batch())
        parts = [weakref.ref(part) for part in (actor, actor.optimizer, actor.ddp[0], actor.chunks[0])]
    del actor
    gc.collect()
    return [type(part()).__name__ for part in parts if part() is not None]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arch", [ARCH, WITH_EXPERTS], ids=["dense", "experts"])
def test_a_model_is_gone_when_nobody_has_it(ranks: Ranks, arch: Architecture, overlap: bool) -> None:
    """With its process groups, and on a GPU its memory; what Megatron-Core holds for good does not lead to it."""
    assert ranks.run(2, _trained_and_forgotten, arch, overlap) == [[], []]


@pytest.mark.parametrize("tp, ep", [(4, 1), (4, 4), (6, 2)])
def test_each_expert_is_on_as_many_ranks_as_share_it(tp: int, ep: int) -> None:
    split, layout = TensorSplit(tp=tp, ep=ep), TrainLayout(ranks=range(tp), ep=ep, etp=tp // ep)
    assert layout.expert_parts(8) == split.expert_parts(8) and layout.expert_parts(0) == []
    for place in (split.expert_place, layout.expert_place):
        places = [place(rank) for rank in range(tp)]
        for expert in range(8):
            assert [at.rank for at in places if expert in at.own(8)] == list(range(split.expert_tp))

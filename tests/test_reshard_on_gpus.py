"""Reshards between GPUs: pulls out of peers' memory, what happens when that is not possible, and what it costs."""

from __future__ import annotations

import gc
import sys
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from reshard_cases import EXPERTS, INTEGERS, architecture
from test_reshard_execute import World, block_group, build

from megarl.parallel.layout import TrainLayout
from megarl.reshard.transport import peer
from megarl.reshard.verify import verify

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or find_spec("triton") is None, reason="needs two GPUs and Triton"
)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of a rank's reshard, and what it was warned of."""

    received: int
    pulled: int
    said: tuple[str, ...] = ()


def needs(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


def other_weights(world: World, dtype: torch.dtype) -> None:
    """Changes every bit that is moved, on both sides of the comparison."""
    for parameter in (*world.source.values(), *world.expected.values()):
        parameter.data.view(INTEGERS[dtype])[:-1] ^= 1


def reshard_twice(world: World, dtype: torch.dtype) -> Moved:
    for _ in range(2):
        world.resharder.run()
        torch.cuda.synchronize()
        world.check()
        verify(world.resharder)
        dist.barrier()
        other_weights(world, dtype)
    return Moved(received=world.resharder.statistics.received, pulled=world.resharder.statistics.pulled)


# ------------------------------------------------------------------------------------------------- exact, any layout


def reshard_all(tp: int, pp: int, generation_tp: int) -> list[Moved]:
    train = TrainLayout(ranks=range(dist.get_world_size()), tp=tp, pp=pp)
    group = block_group(train)
    out = []
    for dtype, tied, moe, num_layers in (
        (torch.float32, False, None, 2 * pp),
        (torch.bfloat16, True, None, 2 * pp + 1),  # one stage has a layer more
        (torch.bfloat16, True, EXPERTS, 2 * pp),
    ):
        arch = architecture(num_layers=num_layers, tied=tied, qkv_bias=True, qk_norm=True, moe=moe)
        world = build(arch, train, generation_tp, dtype=dtype, group=group, device="cuda")
        out.append(reshard_twice(world, dtype))
        world.resharder.release()
    return out


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "generation_tp"),
    [
        (gpus, tp, pp, generation_tp)
        for gpus in (2, 4)
        for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
        for generation_tp in (1, 2, 4)
        if tp * pp <= gpus and generation_tp <= gpus
    ],
)
def test_the_engine_gets_the_logical_tensors(ranks: Ranks, gpus: int, tp: int, pp: int, generation_tp: int) -> None:
    needs(gpus)
    for moved in ranks.run(gpus, reshard_all, tp, pp, generation_tp):
        assert all(case.pulled == case.received for case in moved)


# -------------------------------------------------------------------------------------------------- memory that moves


def move_memory() -> None:
    """New storages on one rank, on the other, and of the engine; released in between; given back and taken again."""
    world = build(architecture(num_layers=2), TrainLayout(ranks=range(2), pp=2), 1, device="cuda")
    world.resharder.run()
    for step in range(8):
        for parameter in world.engine.values():
            if step == 3:
                parameter.data = parameter.detach().clone()
            parameter.data.view(torch.int32)[:-1] = 0
        if step in (dist.get_rank(), 5):
            for parameter in world.source.values():
                kept = parameter.detach().cpu()
                parameter.data = torch.empty(0, device="cuda")
                gc.collect()
                torch.cuda.empty_cache()  # the driver gives out the same addresses again
                parameter.data = kept.to("cuda")
        if step == 6:
            world.resharder.release()
        other_weights(world, torch.float32)
        world.resharder.run()
        torch.cuda.synchronize()
        world.check()
        verify(world.resharder)
        assert world.resharder.statistics.pulled == world.resharder.statistics.received > 0


def test_parameters_may_move(ranks: Ranks) -> None:
    ranks.run(2, move_memory)


def give_memory_back() -> tuple[float, float]:
    """MiB that a GPU lacks while peers have its memory mapped, and after it was released and freed."""
    arch = architecture(num_layers=2, hidden_size=2048, ffn_hidden_size=4096, vocab_size=64)
    train = TrainLayout(ranks=range(2), pp=2)
    group = block_group(train)  # one for both: a communicator of NCCL's takes half a GiB
    warm = build(arch, train, 1, device="cuda", group=group)
    warm.resharder.run()  # NCCL and Triton take what they need
    warm.resharder.release()
    del warm
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    dist.barrier()
    free = torch.cuda.mem_get_info()[0]
    world = build(arch, train, 1, device="cuda", group=group)
    held = sum(p.nbytes for p in (*world.source.values(), *world.engine.values(), *world.expected.values()))
    world.resharder.run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what making the weights has left behind
    dist.barrier()
    while_mapped = free - torch.cuda.mem_get_info()[0] - held
    world.resharder.release()
    del world
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    return while_mapped / MIB, (free - torch.cuda.mem_get_info()[0]) / MIB


def test_no_memory_is_taken_on_peers_and_all_is_given_back(ranks: Ranks) -> None:
    """A CUDA context of another process would take hundreds of MiB; the model takes a hundred."""
    for while_mapped, afterwards in ranks.run(2, give_memory_back):
        assert while_mapped < 64 and afterwards < 8


# -------------------------------------------------------------------------------------- where it cannot be done


def reshard_beside_rank_1(generation_tp: int, ranks_per_node: int = sys.maxsize) -> Moved:
    """TP2 x PP2 on four GPUs, PP2 on two; in buckets of which it takes many."""
    world_size = dist.get_world_size()
    train = TrainLayout(ranks=range(world_size), tp=world_size // 2, pp=2)
    arch = architecture(num_layers=4, hidden_size=512, ffn_hidden_size=1024)  # large enough for segments of its own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = build(arch, train, generation_tp, bucket_bytes=MIB, device="cuda", ranks_per_node=ranks_per_node)
        moved = reshard_twice(world, torch.float32)
    world.resharder.release()
    said = tuple(str(w.message) for w in caught if "cannot read the GPU memory" in str(w.message))
    return Moved(received=moved.received, pulled=moved.pulled, said=said)


def with_unshareable_memory(generation_tp: int) -> Moved:
    """An interprocess handle cannot name memory of expandable segments."""
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{dist.get_rank() == 1}")
    try:
        return reshard_beside_rank_1(generation_tp)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        gc.collect()
        torch.cuda.empty_cache()


def without_triton(generation_tp: int) -> Moved:
    usual = peer.TRITON
    peer.TRITON = usual and dist.get_rank() != 1
    try:
        return reshard_beside_rank_1(generation_tp)
    finally:
        peer.TRITON = usual


def on_two_hosts(generation_tp: int) -> Moved:
    """The first half of the ranks on one, the others on the other, as far as they know."""
    usual = peer.host_identity
    peer.host_identity = lambda: f"{usual()} {2 * dist.get_rank() // dist.get_world_size()}"
    try:
        return reshard_beside_rank_1(generation_tp, ranks_per_node=dist.get_world_size() // 2)
    finally:
        peer.host_identity = usual


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_rank_whose_memory_cannot_be_shared(ranks: Ranks, gpus: int) -> None:
    needs(gpus)
    moved = ranks.run(gpus, with_unshareable_memory, gpus // 2)
    (said,) = [line for rank in moved for line in rank.said]
    assert "of rank 1 (" in said and "expandable segments" in said
    taker = gpus - 1 if gpus == 4 else 0  # who takes from rank 1: the next stage, or the one before
    for rank, m in enumerate(moved):
        assert (m.pulled < m.received) == (rank == taker) and m.received > 0


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_rank_that_cannot_pull(ranks: Ranks, gpus: int) -> None:
    needs(gpus)
    moved = ranks.run(gpus, without_triton, gpus // 2)
    (said,) = [line for rank in moved for line in rank.said]
    assert said.startswith("rank 1 cannot read") and "Triton is not installed" in said
    for rank, m in enumerate(moved):
        assert m.pulled == (0 if rank == 1 else m.received)


@pytest.mark.parametrize("gpus", [2, 4])
def test_hosts_exchange_buckets_and_pull_within(ranks: Ranks, gpus: int) -> None:
    needs(gpus)
    moved = ranks.run(gpus, on_two_hosts, gpus)
    assert not any(rank.said for rank in moved)
    for rank, m in enumerate(moved):
        assert m.pulled < m.received  # the other stage is on the other host
        # a quarter may lie in the half that the other rank of the host trains
        assert (m.pulled > 0) == (gpus == 4 and rank in (1, 2))


def test_replicas_of_a_host_exchange_what_they_take_from_the_other(ranks: Ranks) -> None:
    needs(4)
    moved = ranks.run(4, on_two_hosts, 1)
    assert not any(rank.said for rank in moved)
    for m in moved:
        # of four parts a rank has one, pulls the one that the other rank of its host trains, and lacks two
        assert m.pulled == pytest.approx(m.received / 3, rel=0.1)

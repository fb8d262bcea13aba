"""Reshards between real gloo ranks, bit for bit."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from reshard_cases import EXPERTS, INTEGERS, architecture, logical_values, parameters, same_bits
from selection import quick

from megarl.models.architecture import Architecture
from megarl.models.parameter_names import ParameterNames
from megarl.models.weights import EMBEDDING, FINAL_NORM
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.parallel.pipeline_split import BALANCED, PipelineSplit
from megarl.reshard.execute import Resharder
from megarl.reshard.plan import Piece, Transform, plan_reshard
from megarl.reshard.sides import engine_side, training_side
from megarl.reshard.verify import checksum, verify
from megarl.reshard.views import StridedView

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's side of a test."""

    resharder: Resharder
    source: Parameters
    engine: Parameters
    expected: Parameters

    def check(self) -> None:
        for name, parameter in self.engine.items():
            assert same_bits(parameter, self.expected[name]), f"{name} on rank {dist.get_rank()}"


def block_group(train: TrainLayout) -> dist.ProcessGroup:
    """The group of this rank's model-parallel block; every rank makes all groups in the same order."""
    blocks = sorted({train.model_ranks(rank) for rank in train.ranks})
    groups = {block: dist.new_group(list(block)) for block in blocks}
    return groups[train.model_ranks(dist.get_rank())]


def build(
    arch: Architecture,
    train: TrainLayout,
    generation_tp: int,
    *,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 1 << 20,
    group: dist.ProcessGroup | None = None,
    device: str = "cpu",
    ranks_per_node: int = sys.maxsize,
) -> World:
    rank = dist.get_rank()
    generation = GenerationLayout(ranks=range(train.size), tp=generation_tp)
    values = logical_values(arch, dtype)
    sides = (
        training_side(arch, train, ParameterNames(fused_norms=True, grouped_experts=True)),
        engine_side(arch, generation),
    )
    held, wanted = (list(side.placements(rank)) for side in sides)
    source = {name: torch.nn.Parameter(p.to(device)) for name, p in parameters(held, values, dtype).items()}
    engine = {name: torch.nn.Parameter(p.to(device)) for name, p in parameters(wanted, {}, dtype).items()}
    expected = {name: p.to(device) for name, p in parameters(wanted, values, dtype).items()}
    plan = plan_reshard(*sides, rank, ranks_per_node=ranks_per_node)
    resharder = Resharder(plan, source, engine, group or block_group(train), bucket_bytes=bucket_bytes)
    return World(resharder=resharder, source=source, engine=engine, expected=expected)


# ------------------------------------------------------------------------------------------------- exact, any layout


def reshard_all(tp: int, pp: int, generation_tp: int) -> list[int]:
    """Both dtypes, with buckets that hold everything and buckets of which a row fills several; experts; nodes of two
    ranks; twice each."""
    train = TrainLayout(ranks=range(dist.get_world_size()), tp=tp, pp=pp)
    group = block_group(train)
    moved = []
    cases = (
        (torch.float32, 1 << 20, False, None, sys.maxsize),
        (torch.bfloat16, 144, True, None, sys.maxsize),
        (torch.float32, 4096, True, EXPERTS, sys.maxsize),
        (torch.float32, 4096, True, EXPERTS, 2),
    )
    for dtype, bucket_bytes, tied, moe, ranks_per_node in cases:
        arch = architecture(num_layers=2 * pp - 1, tied=tied, qkv_bias=True, qk_norm=True, moe=moe)
        world = build(
            arch,
            train,
            generation_tp,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            group=group,
            ranks_per_node=ranks_per_node,
        )
        world.resharder.run()
        world.check()
        verify(world.resharder)
        for parameter in (*world.source.values(), *world.expected.values()):
            bits = parameter.data.view(INTEGERS[dtype])
            bits[:-1] ^= 1  # the guard rows stay
        world.resharder.run()
        world.check()
        verify(world.resharder)
        assert world.resharder.statistics.buffers <= 4 * bucket_bytes
        moved.append(world.resharder.statistics.received)
    return moved


LAYOUTS = [
    (world, tp, pp, generation_tp)
    for world in (1, 2, 4)
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
    for generation_tp in (1, 2, 4)
    if tp * pp <= world and generation_tp <= world
]


@pytest.mark.parametrize(("world", "tp", "pp", "generation_tp"), quick(LAYOUTS, *range(0, len(LAYOUTS), 3)))
def test_the_engine_gets_the_logical_tensors(ranks: Ranks, world: int, tp: int, pp: int, generation_tp: int) -> None:
    for received in ranks.run(world, reshard_all, tp, pp, generation_tp):
        assert received[2] == received[3]  # on whatever way
        if tp == pp == 1:
            assert not any(received)


def reshard_split(pp: int, chunks: int, split: PipelineSplit) -> None:
    train = TrainLayout(ranks=range(pp), pp=pp, chunks=chunks, split=split)
    world = build(architecture(num_layers=8), train, pp, bucket_bytes=4096)
    world.resharder.run()
    world.check()
    verify(world.resharder)


@pytest.mark.parametrize(
    ("pp", "chunks", "split"),
    [
        (2, 2, BALANCED),
        (2, 1, PipelineSplit(num_layers_in_last_pipeline_stage=1)),
        (2, 2, PipelineSplit(pipeline_model_parallel_layout="E|t*5|t|ttL")),
        (4, 1, PipelineSplit(pipeline_model_parallel_layout="E|t*7|t|L")),
    ],
)
def test_pipelines_of_any_split(ranks: Ranks, pp: int, chunks: int, split: PipelineSplit) -> None:
    ranks.run(pp, reshard_split, pp, chunks, split)


def reshard_disjoint(tp: int, pp: int, generation_tp: int) -> None:
    """Ranks 0 and 1 train, 2 and 3 generate; half of the weights' values are negated on their way."""
    rank, dtype = dist.get_rank(), torch.float32
    arch = architecture(num_layers=3, qkv_bias=True, moe=EXPERTS)
    source = training_side(arch, TrainLayout(ranks=range(2), tp=tp, pp=pp), ParameterNames())
    target = engine_side(arch, GenerationLayout(ranks=range(2, 4), tp=generation_tp))
    values = logical_values(arch, dtype)
    flipped = {name: -value if "norm" in name else value for name, value in values.items()}
    trains = rank in (0, 1)
    held = parameters(source.placements(rank), values, dtype) if trains else {}
    engine = {} if trains else parameters(target.placements(rank), {}, dtype)
    expected = {} if trains else parameters(target.placements(rank), flipped, dtype)

    def transform_of(piece: Piece) -> Transform | None:
        return torch.neg if "norm" in piece.tensor else None

    plan = plan_reshard(source, target, rank).transformed(transform_of)
    assert not plan.local and bool(plan.sends) == trains and bool(plan.receives) == (not trains)
    number = {r: i for i, ranks in enumerate(source.copies) for r in ranks}
    group = dist.new_group([0, 1, 2, 3])
    resharder = Resharder(plan, held, engine, group, transport="collective", bucket_bytes=4096)
    for _ in range(2):
        resharder.run()
        verify(resharder)
        for name, parameter in engine.items():
            assert same_bits(parameter, expected[name]), name
            parameter.zero_()
            expected[name][-1:] = 0  # the guard rows
    assert len(source.copies) == 1 or set(plan.sends) == ({2 + number[rank]} if trains else set())
    resharder.release()


@pytest.mark.parametrize(("tp", "pp", "generation_tp"), [(2, 1, 2), (2, 1, 1), (1, 2, 1), (1, 1, 1), (1, 1, 2)])
def test_other_ranks_than_those_that_train_get_the_weights(ranks: Ranks, tp: int, pp: int, generation_tp: int) -> None:
    ranks.run(4, reshard_disjoint, tp, pp, generation_tp)


# ------------------------------------------------------------------------------------------------------------- memory


def move_storage() -> None:
    world = build(architecture(num_layers=2), TrainLayout(ranks=range(2), pp=2), 1)
    for parameter in (*world.source.values(), *world.engine.values()):
        parameter.data = parameter.detach().clone()
    world.resharder.run()
    world.check()

    world = build(architecture(num_layers=2), TrainLayout(ranks=range(2), pp=2), 1)
    held = []
    for parameter in (*world.source.values(), *world.engine.values()):
        memory = np.empty(parameter.numel(), dtype=np.float32)
        held.append(weakref.ref(memory))
        parameter.data = torch.from_numpy(memory).view(parameter.shape).copy_(parameter.detach())
        del memory
    world.resharder.run()
    world.check()
    for parameter in (*world.source.values(), *world.engine.values()):
        parameter.data = torch.empty(0)
    assert all(memory() is None for memory in held)


def test_parameters_may_move_and_their_memory_is_not_held(ranks: Ranks) -> None:
    ranks.run(2, move_storage)


def count_bytes() -> tuple[int, int, int, int]:
    arch = architecture(num_layers=2)
    statistics = build(arch, TrainLayout(ranks=range(2), pp=2), 1, bucket_bytes=1 << 20).resharder.statistics
    return statistics.local, statistics.sent, statistics.received, statistics.buffers


def test_statistics(ranks: Ranks) -> None:
    embedding, norm, layer = 13 * 6, 6, 8 * 4 * 6 + 2 * 2 * 4 * 6 + 6 * 8 * 4 + 3 * 6 * 8 + 2 * 6
    stages = (4 * (embedding + layer), 4 * (layer + norm + embedding))
    counted = ranks.run(2, count_bytes)
    for (local, sent, received, buffers), mine, other in zip(counted, stages, stages[::-1], strict=True):
        assert (local, sent, received) == (mine, mine, other)
        assert mine + other <= buffers < mine + other + 16 * 2 * 10  # one round; pieces start at multiples of 16


# ------------------------------------------------------------------------------------------------------------- errors


def refuse() -> list[str]:
    arch, train = architecture(num_layers=1), TrainLayout(ranks=range(1))
    world = build(arch, train, 1)
    qkv, norm = "0.decoder.layers.0.self_attention.linear_qkv.weight", "model.norm.weight"
    wide = world.source[qkv].new_zeros(world.source[qkv].shape[0], 7)
    broken: list[tuple[Parameters, Parameters]] = [
        ({k: v for k, v in world.source.items() if k != qkv}, world.engine),
        (world.source, {k: v for k, v in world.engine.items() if k != norm}),
        (dict(world.source) | {qkv: wide}, world.engine),
        (world.source, dict(world.engine) | {norm: torch.zeros(5)}),
        (dict(world.source) | {qkv: world.source[qkv].bfloat16()}, world.engine),
        (dict(world.source) | {qkv: torch.zeros(6, world.source[qkv].shape[0]).t()}, world.engine),
    ]
    messages = []
    for (source, engine), bucket_bytes in [(b, 1 << 20) for b in broken] + [((world.source, world.engine), 15)]:
        with pytest.raises(ValueError) as error:
            Resharder(world.resharder.plan, source, engine, world.resharder.group, bucket_bytes=bucket_bytes)
        messages.append(str(error.value))
    return messages


def test_what_does_not_fit_is_named(ranks: Ranks) -> None:
    qkv = "0.decoder.layers.0.self_attention.linear_qkv.weight"
    starts = [
        f"the training model has no parameter {qkv}",
        "the engine model has no parameter model.norm.weight",
        f"training parameter {qkv} has shape [49, 7], but model.layers.0.self_attn.q_proj.weight needs its rows 0",
        "engine parameter model.norm.weight has shape [5], but",
        f"training parameter {qkv} is torch.bfloat16, but the engine's first parameter is torch.float32",
        f"training parameter {qkv} is not contiguous",
        "bucket_bytes = 15 is too small for this group; use at least 16",
    ]
    for message, start in zip(ranks.run(1, refuse)[0], starts, strict=True):
        assert message.startswith(start)


# ------------------------------------------------------------------------------------------------------------- verify


def spoil(name: str, how: str) -> str:
    """Damages one engine parameter on rank 1 after an exact reshard; what `verify` says."""
    world = build(architecture(num_layers=2), TrainLayout(ranks=range(4), tp=2, pp=2), 2)
    world.resharder.run()
    verify(world.resharder)
    if dist.get_rank() == 1:
        bits = world.engine[name].data.view(torch.int32).view(-1)
        if how == "flip":
            bits[3] ^= 1 << 31
        else:
            bits[1], bits[4] = bits[4].clone(), bits[1].clone()
    try:
        verify(world.resharder)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["flip", "swap"])
@pytest.mark.parametrize(("name", "source"), [(EMBEDDING, 1), (FINAL_NORM, 3)])
def test_verify_names_what_differs(ranks: Ranks, name: str, source: int, how: str) -> None:
    said = ranks.run(4, spoil, name, how)
    assert said[0] == said[2] == said[3] == ""
    assert said[1].startswith("1 pieces differ") and f"{name} (rank {source} to rank 1)" in said[1]


def spoil_a_share() -> str:
    """As `spoil`, of what rank 1 got from the other node and passed on to rank 0."""
    layout = TrainLayout(ranks=range(4), pp=4)
    world = build(architecture(num_layers=4), layout, 1, ranks_per_node=2)
    world.resharder.run()
    verify(world.resharder)
    if dist.get_rank() == 1:
        world.engine[FINAL_NORM].data.view(torch.int32)[4] ^= 1
    try:
        verify(world.resharder)
    except RuntimeError as error:
        return str(error)
    return ""


def test_verify_sees_both_steps_of_what_a_node_shares(ranks: Ranks) -> None:
    said = ranks.run(4, spoil_a_share)
    assert said[2] == said[3] == ""
    assert f"{FINAL_NORM} (rank 3 to rank 1)" in said[1] and f"{FINAL_NORM} (rank 1 to rank 0)" in said[0]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_checksum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equals the formula in Python integers on a strided view, whatever the chunks; sees the sign of zero."""
    parameter = torch.randint(-(1 << 15), 1 << 15, (7, 5, 6)).to(INTEGERS[dtype]).view(dtype)
    parameter[1, 1, 1] = float("nan")
    view = StridedView(parameter, (6, 3, 4), (30, 6, 1), 37)
    bits = view.tensor().contiguous().view(INTEGERS[dtype]).flatten().tolist()
    want = sum(b * (i * (i + 1) + 1) for i, b in enumerate(bits)) % 2**64
    assert int(checksum(view)) % 2**64 == want
    monkeypatch.setattr("megarl.reshard.verify.CHUNK", 7)
    assert int(checksum(view)) % 2**64 == want
    parameter[2, 2, 2] = 0.0
    zero = int(checksum(view))
    parameter[2, 2, 2] = -0.0
    assert int(checksum(view)) != zero

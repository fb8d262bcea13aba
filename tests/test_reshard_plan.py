"""The reshard's plan over random models and layouts, without process groups."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_cases import EXPERTS, architecture, logical_values, parameters, same_bits, shapes, slices

from megarl.models.architecture import Architecture
from megarl.models.tensors import engine_placements, training_placements
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.reshard.plan import Piece, Plan, choose_sources, plan_reshard
from megarl.reshard.views import StridedView, view_of


@dataclass(frozen=True, kw_only=True)
class Case:
    arch: Architecture
    train: TrainLayout
    generation: GenerationLayout
    transformer_engine: bool
    block: tuple[int, ...]

    def plans(self) -> dict[int, Plan]:
        return {
            rank: plan_reshard(self.arch, self.train, self.generation, rank, transformer_engine=self.transformer_engine)
            for rank in self.block
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp, pp, dp, generation_tp = (draw(st.sampled_from((1, 2, 4))) for _ in range(4))
    cp, chunks = draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((1, 2)))
    world = -(-tp * pp * dp * cp // generation_tp) * generation_tp
    if world % (tp * pp * cp):  # fewer training ranks than one generation replica
        world = tp * pp * cp * generation_tp
    train = TrainLayout(world_size=world, tp=tp, pp=pp, cp=cp, chunks=chunks)
    groups = draw(st.sampled_from((1, 2, 4)))
    most = max(tp, generation_tp)
    arch = architecture(
        num_layers=pp * chunks * draw(st.sampled_from((1, 2))),
        vocab_size=draw(st.sampled_from((5, 8, 13))),  # 5 leaves the last of four ranks without a row
        tied=draw(st.booleans()),
        num_key_value_heads=groups,
        num_attention_heads=groups * draw(st.sampled_from([n for n in (1, 2, 4) if groups * n % most == 0])),
        head_dim=draw(st.sampled_from((4, 8))),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        moe=draw(st.sampled_from((None, EXPERTS))),
    )
    arch.check_training(tp=tp, pp=pp, chunks=chunks, sequence_parallel=True)
    arch.check_generation(tp=generation_tp)
    return Case(
        arch=arch,
        train=train,
        generation=GenerationLayout(world_size=world, tp=generation_tp),
        transformer_engine=draw(st.booleans()),
        block=train.model_ranks(draw(st.integers(0, world - 1))),
    )


def arriving(plan: Plan) -> list[Piece]:
    return [*plan.local, *(piece for pieces in plan.receives.values() for piece in pieces)]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_destination_element_is_written_exactly_once(case: Case) -> None:
    for rank, plan in case.plans().items():
        placements = list(engine_placements(case.arch, case.generation.tp, case.generation.coords(rank).tp))
        written = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes(placements).items()}
        for piece in arriving(plan):
            at = piece.destination
            assert piece.destination_rank == rank
            held = written[at.param][slice(*at.rows)].reshape(at.view)[slices(at.index)]
            held[slices(piece.destination_part)] += 1
        for name, count in written.items():
            assert (count == 1).all(), name


@settings(max_examples=60, deadline=None)
@given(cases())
def test_sources_hold_what_they_send_and_both_ends_agree(case: Case) -> None:
    plans = case.plans()
    held = {
        rank: set(training_placements(case.arch, case.train, rank, transformer_engine=case.transformer_engine))
        for rank in case.block
    }
    for rank, plan in plans.items():
        assert not {rank, *plan.sends, *plan.receives} - set(case.block)
        for piece in arriving(plan):
            assert piece.source in held[piece.source_rank]
            assert piece.source.tensor == piece.destination.tensor == piece.tensor
            for (lo, hi), (first, last) in zip(piece.box, piece.source.box, strict=True):
                assert first <= lo < hi <= last
            if piece.source_rank != rank:  # never from elsewhere what the rank has itself
                assert all(p.box != piece.source.box for p in held[rank] if p.tensor == piece.tensor)
        for peer, pieces in plan.receives.items():
            assert pieces and pieces == plans[peer].sends[rank]
        for peer in plan.sends:
            assert rank in plans[peer].receives


@settings(max_examples=60, deadline=None)
@given(cases())
def test_replicated_tensors_are_sent_by_their_holders_in_equal_parts(case: Case) -> None:
    sent: dict[tuple[str, object], dict[int, set[int]]] = {}
    for rank, plan in case.plans().items():
        held = training_placements(case.arch, case.train, rank, transformer_engine=case.transformer_engine)
        for placement in held:
            sent.setdefault((placement.tensor, placement.box), {}).setdefault(rank, set())
        for peer, pieces in plan.sends.items():
            for piece in pieces:
                sent.setdefault((piece.tensor, piece.source.box), {}).setdefault(rank, set()).add(peer)
    for takers in sent.values():
        numbers = [len(peers) for peers in takers.values()]
        assert max(numbers) - min(numbers) <= 1


def test_the_odd_taker_does_not_always_fall_to_the_same_holder() -> None:
    chosen = [choose_sources([0, 1, 2, 3], [0, 3], turn) for turn in range(2)]
    assert chosen == [{0: 0, 3: 3, 1: 0, 2: 3}, {0: 0, 3: 3, 1: 3, 2: 0}]
    odd = [choose_sources([0, 1, 2], [0, 2], turn)[1] for turn in range(4)]
    assert odd == [0, 2, 0, 2]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_copying_the_pieces_gives_the_engine_the_logical_tensors(case: Case) -> None:
    values = logical_values(case.arch, torch.float32)
    source = {
        rank: parameters(
            training_placements(case.arch, case.train, rank, transformer_engine=case.transformer_engine),
            values,
            torch.float32,
        )
        for rank in case.block
    }
    for rank, plan in case.plans().items():
        placements = list(engine_placements(case.arch, case.generation.tp, case.generation.coords(rank).tp))
        engine, expected = (parameters(placements, have, torch.float32) for have in ({}, values))
        for piece in arriving(plan):
            there = source[piece.source_rank][piece.source.param]
            read = view_of(there, piece.source, piece.source_part)
            write = view_of(engine[piece.destination.param], piece.destination, piece.destination_part)
            write.tensor().copy_(read.tensor())
        for name, parameter in engine.items():
            assert same_bits(parameter, expected[name]), name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_flat_range_is_that_range_of_the_strided_view(size: list[int], data: st.DataObject) -> None:
    parameter = torch.arange(2 + int(np.prod([n + 1 for n in size])))
    stride = [int(np.prod([n + 1 for n in size[axis + 1 :]])) for axis in range(len(size))]
    view = StridedView(parameter, tuple(size), tuple(stride), 2)
    start = data.draw(st.integers(0, view.numel - 1))
    stop = data.draw(st.integers(start + 1, view.numel))
    parts = [part.tensor().reshape(-1) for part in view.flat_range(start, stop)]
    assert torch.equal(torch.cat(parts), view.tensor().reshape(-1)[start:stop])


@pytest.mark.parametrize(
    ("name", "sizes", "tp", "pp", "generation_tp"),
    [
        ("Llama-3-8B", (32, 4096, 14336, 32), 2, 2, 2),
        ("Llama-3-70B", (80, 8192, 28672, 64), 8, 4, 8),
        ("Llama-3-70B", (80, 8192, 28672, 64), 8, 4, 4),
    ],
)
def test_planning_time(name: str, sizes: tuple[int, int, int, int], tp: int, pp: int, generation_tp: int) -> None:
    """Prints, since a shared machine's clock proves nothing; a plan per rank of 16,384."""
    layers, hidden, ffn, heads = sizes
    arch = Architecture(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=8192,
    )
    train = TrainLayout(world_size=16_384, tp=tp, pp=pp)
    generation = GenerationLayout(world_size=16_384, tp=generation_tp)
    start = time.perf_counter()
    plan = plan_reshard(arch, train, generation, 0, transformer_engine=True)
    seconds = time.perf_counter() - start
    print(f"{name} TP{tp} x PP{pp} -> TP{generation_tp}: {seconds:.3f} s, {len(arriving(plan))} pieces arrive")

"""The torch-free rank arithmetic against the groups that Megatron-Core makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks

from megarl.parallel.layout import GenerationLayout, TrainLayout, closest_stride


def _groups_of(train: TrainLayout, generation: GenerationLayout) -> dict[str, Any]:
    from megarl.parallel.groups import build_groups, destroy_groups

    groups = build_groups(train, generation)
    found = {name: dist.get_process_group_ranks(getattr(groups.pgs, name)) for name in ("tp", "pp", "dp", "mp")}
    found["generation"] = dist.get_process_group_ranks(groups.generation_tp)
    found["everybody"] = groups.all_gather(groups.rank)
    destroy_groups()
    return found


@pytest.mark.parametrize(("tp", "pp", "dp", "gen_tp"), [(2, 2, 1, 4), (2, 1, 2, 2), (1, 2, 2, 1), (4, 1, 1, 2)])
def test_ranks_are_where_megatron_puts_them(ranks: Ranks, tp: int, pp: int, dp: int, gen_tp: int) -> None:
    world = tp * pp * dp
    train = TrainLayout(world_size=world, tp=tp, pp=pp)
    generation = GenerationLayout(world_size=world, tp=gen_tp, stride=closest_stride(train, gen_tp))
    for rank, found in enumerate(ranks.run(world, _groups_of, train, generation)):
        at = train.coords(rank)
        assert train.rank(tp=at.tp, dp=at.dp, pp=at.pp) == rank
        assert found["tp"] == [train.rank(tp=i, dp=at.dp, pp=at.pp) for i in range(tp)]
        assert found["pp"] == [train.rank(tp=at.tp, dp=at.dp, pp=i) for i in range(pp)]
        assert found["dp"] == [train.rank(tp=at.tp, dp=i, pp=at.pp) for i in range(dp)]
        assert tuple(found["mp"]) == train.model_ranks(rank)
        assert tuple(found["generation"]) == generation.ranks(generation.coords(rank).replica)
        assert found["everybody"] == list(range(world))


def test_strided_replicas() -> None:
    train = TrainLayout(world_size=8, tp=4, pp=2)
    layout = GenerationLayout(world_size=8, tp=2, stride=closest_stride(train, 2))
    assert [layout.ranks(i) for i in range(layout.replicas)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [layout.coords(rank).tp for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.coords(rank).replica for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [closest_stride(train, tp) for tp in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]


def test_every_layer_is_on_one_stage() -> None:
    for pp, chunks in ((1, 1), (4, 1), (2, 3), (4, 2)):
        layout = TrainLayout(world_size=pp, pp=pp, chunks=chunks)
        held = [layer for chunk in range(chunks) for stage in range(pp) for layer in layout.layers(24, stage, chunk)]
        assert held == list(range(24))
    assert list(TrainLayout(world_size=2, pp=2, chunks=2).layers(8, 1, 0)) == [2, 3]


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot be split into tensor x pipeline x context = 2 x 2 x 1"):
        TrainLayout(world_size=6, tp=2, pp=2)
    with pytest.raises(ValueError, match="use a rollout tensor_model_parallel_size that divides 6"):
        GenerationLayout(world_size=6, tp=4)

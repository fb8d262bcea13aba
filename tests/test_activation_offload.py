"""Layers' inputs that wait in host memory for the backward pass change no bit, and nothing else of a layer is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from selection import quick
from tiny_run import write_run
from training_cases import ARCH, Case, actor_in, fixed_batch, train

from megarl.config import load_config
from megarl.trainer.admission.checks import check_run


def _model(**keys: bool) -> dict[str, Any]:
    return {"model": {"dtype": "float32", "enable_gradient_checkpointing": True, **keys}}


LAYOUTS = [
    dict(tp=2, sequence_parallel=True),
    dict(cp=2),
    dict(pp=2, dp=2, chunks=2),
    dict(pp=2, tp=2, packed=False),
]


@pytest.mark.parametrize("layout", quick(LAYOUTS, 0), ids=str)
def test_the_same_bits(ranks: Ranks, layout: dict[str, Any]) -> None:
    for mode in ("policy", "supervised"):
        here, moved = (
            ranks.run(case.world, train, case, 3, mode)
            for case in (Case(**layout, config=_model(**keys)) for keys in ({}, {"enable_activation_offload": True}))
        )
        assert moved == here


def _moved(packed: bool) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of all that an update moves to the host, and the tokens of its only micro-batch."""
    from torch.autograd.graph import saved_tensors_hooks

    import megarl.roles.model as module

    shapes: list[tuple[int, ...]] = []

    class Recording(saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory

            def pack(x: torch.Tensor) -> torch.Tensor:
                shapes.append(tuple(x.shape))
                return x.clone()

            super().__init__(pack, lambda x: x)

    case = Case(packed=packed, config=_model(enable_activation_offload=True))
    kept, module.save_on_cpu = module.save_on_cpu, Recording
    try:
        with actor_in(case) as actor:
            batch = fixed_batch()
            plan = actor.plan(batch)
            (mini_batch,) = plan.mini_batches
            from megarl.algorithms.cross_entropy import cross_entropy

            actor.update(batch, mini_batch, cross_entropy)
            assert len(mini_batch.micro_batches) == 1
            moved = len(shapes)
            actor.log_probs(batch, plan)
            assert len(shapes) == moved  # without gradients nothing is kept
    finally:
        module.save_on_cpu = kept
    return shapes, int(batch.lengths.sum())


def test_what_moves_is_each_layer_s_input(ranks: Ranks) -> None:
    ((shapes, tokens),) = ranks.run(1, _moved, True)
    hidden = sum(shape == (tokens, 1, ARCH.hidden_size) for shape in shapes)
    assert ARCH.num_layers < hidden <= ARCH.num_layers + 3  # and of the last norm
    assert max(torch.Size(shape).numel() for shape in shapes) == tokens * ARCH.hidden_size


def test_it_is_for_what_recomputation_keeps(tmp_path: Path) -> None:
    config = load_config(str(write_run(tmp_path, actor_rollout_ref__model__enable_activation_offload=True)))
    with pytest.raises(ValueError, match=r"^model.enable_activation_offload is for what model.enable_gradient_check"):
        check_run(config)

"""What Megatron-Core really holds against what the budget says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import Ranks
from training_cases import ARCH, Case, actor_in

from megarl.estimate.job import training_elements
from megarl.parallel.layout import TrainLayout

WIDER = replace(ARCH, hidden_size=128, ffn_hidden_size=256)
"""So that the padding of vocabulary and buffers is a small part."""


def _bytes_held(case: Case, dtype: str) -> dict[str, int]:
    from megarl.roles.optimizer_state import MOMENTS, _slot

    with actor_in(case, WIDER, dtype) as actor:
        parameters = list(actor.parameters().values())
        weights = {p.untyped_storage().data_ptr() for p in parameters}
        held = {
            "weights": sum(p.nbytes for p in parameters),
            "gradients": sum(buffer.grad_data.nbytes for model in actor.ddp for buffer in model.buffers),
            "optimizer": 0,
        }
        for slot in filter(None, (_slot(actor.optimizer._adam, p) for p in parameters)):
            state = slot.tensors()
            held["optimizer"] += sum(state[name].nbytes for name in MOMENTS)
            if slot.main.untyped_storage().data_ptr() not in weights:
                held["optimizer"] += slot.main.nbytes
        return held


@pytest.mark.parametrize("case", [Case(tp=2, dp=2, sequence_parallel=True), Case(tp=2, pp=2)], ids=lambda c: c.name)
@pytest.mark.parametrize(("dtype", "itemsize", "master"), [("float32", 4, 0), ("bfloat16", 2, 4)])
def test_megatron_holds_what_the_budget_says(ranks: Ranks, case: Case, dtype: str, itemsize: int, master: int) -> None:
    layout = TrainLayout(world_size=case.world, tp=case.tp, pp=case.pp)
    held = ranks.run(case.world, _bytes_held, case, dtype)
    for rank, found in enumerate(held):
        elements = training_elements(WIDER, layout, rank)
        assert found["weights"] == pytest.approx(itemsize * elements, rel=0.01)
        assert found["gradients"] == pytest.approx(4 * elements, rel=0.01)
    # a rank's share of the optimizer's state need not be even: buffers are cut into equal parts, padding included
    total = sum(training_elements(WIDER, layout, rank) for rank in range(case.world))
    assert sum(found["optimizer"] for found in held) == pytest.approx((8 + master) * total / case.dp, rel=0.01)

"""What Megatron-Core really holds against what the budget says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import changed
from ranks import Ranks
from selection import quick
from test_offload import _held
from training_cases import (
    ARCH,
    Case,
    Squares,
    actor_in,
    beside,
    fixed_batch,
    layout_of,
    mini_batch_of,
    update,
    with_targets,
)

from megarl.config import build_config
from megarl.estimate.accelerator import H200
from megarl.estimate.budget import budget
from megarl.estimate.job import training_elements
from megarl.parallel.layout import TrainLayout
from megarl.phases import Phase
from megarl.trainer.memory import job_of

WIDER = changed(ARCH, hidden_size=128, ffn_hidden_size=256)
"""So that the padding of vocabulary and buffers is a small part."""


def _bytes_held(case: Case, dtype: str) -> dict[str, int]:
    from megarl.roles.optimizer_state import MOMENTS, Slots

    with actor_in(case, WIDER, dtype) as actor:
        parameters = list(actor.parameters().values())
        weights = {p.untyped_storage().data_ptr() for p in parameters}
        held = {
            "weights": sum(p.nbytes for p in parameters),
            "gradients": sum(buffer.grad_data.nbytes for model in actor.ddp for buffer in model.buffers),
            "optimizer": 0,
        }
        for slot in filter(None, map(Slots(actor.optimizer._adam).of, parameters)):
            state = slot.tensors()
            held["optimizer"] += sum(state[name].nbytes for name in MOMENTS)
            if slot.main.untyped_storage().data_ptr() not in weights:
                held["optimizer"] += slot.main.nbytes
        return held


@pytest.mark.parametrize(
    "case",
    quick(
        [
            Case(tp=2, dp=2, sequence_parallel=True),
            Case(tp=2, pp=2),
            Case(cp=2, dp=2),
            Case(tp=2, cp=2, sequence_parallel=True),
        ],
    ),
    ids=lambda c: c.name,
)
@pytest.mark.parametrize(("dtype", "itemsize", "master"), quick([("float32", 4, 0), ("bfloat16", 2, 4)], 1))
def test_megatron_holds_what_the_budget_says(ranks: Ranks, case: Case, dtype: str, itemsize: int, master: int) -> None:
    layout = TrainLayout(ranks=range(case.world), tp=case.tp, pp=case.pp, cp=case.cp)
    held = ranks.run(case.world, _bytes_held, case, dtype)
    for rank, found in enumerate(held):
        elements = training_elements(WIDER, layout, rank)
        assert found["weights"] == pytest.approx(itemsize * elements, rel=0.01)
        assert found["gradients"] == pytest.approx(4 * elements, rel=0.01)
    # a rank's share of the optimizer's state need not be even: buffers are cut into equal parts, padding included
    total = sum(training_elements(WIDER, layout, rank) for rank in range(case.world)) / (case.dp * case.cp)
    assert sum(found["optimizer"] for found in held) == pytest.approx((8 + master) * total, rel=0.01)


MODES = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
ACTOR, JUDGE = Case(tp=2, pp=2), Case(tp=2, dp=2)
"""Each, and the critic, in a layout of its own."""

STEP = (
    Phase.RESHARD,
    Phase.GENERATE,
    Phase.REWARD,
    Phase.LOG_PROBS,
    Phase.VALUES,
    Phase.UPDATE_CRITIC,
    Phase.UPDATE,
)


def _bytes_in_phases(dtype: str, modes: dict[str, bool], cp: int) -> dict[Phase, dict[str, int]]:
    """What this rank holds of a critic and a reward model in each phase of the second step."""
    from megarl.config.policy import BatchingConfig, MegatronConfig, ModelConfig
    from megarl.hybrid.residency import Residency
    from megarl.models.fill import random_source
    from megarl.parallel.train_groups import train_groups
    from megarl.roles.frozen import Judge

    moving = {"actor": {"megatron": modes}}
    with actor_in(replace(ACTOR, config=moving), WIDER, dtype) as actor:
        critic = beside(actor, Case(pp=2, cp=cp, dp=2 // cp, config=moving), WIDER, dtype)
        judge = Judge(
            WIDER,
            train_groups(actor.groups.world, layout_of(JUDGE)),
            model=ModelConfig(dtype=dtype),
            megatron=MegatronConfig(param_offload=bool(modes)),
            batching=BatchingConfig(),
            initial=lambda model: model.load(random_source(model.arch, 2)),
        )
        residency = Residency()
        for model in (actor, critic, judge):
            residency.add(model.kind, model.memory)
        batch, targets = fixed_batch(), with_targets()
        work = {
            Phase.REWARD: lambda: judge.scores(batch, mini_batch_of(judge)),
            Phase.LOG_PROBS: lambda: actor.log_probs(batch, mini_batch_of(actor)),
            Phase.VALUES: lambda: critic.values(batch, mini_batch_of(critic)),
            Phase.UPDATE_CRITIC: lambda: update(critic, targets, Squares("advantages")),
            Phase.UPDATE: lambda: update(actor, batch),
        }
        held = {}
        for _ in range(2):
            for phase in STEP:
                residency.enter(phase)
                work.get(phase, lambda: None)()
                held[phase] = {**_state(critic), "reward model weights": _held(*judge.parameters().values())}
        return held


def _state(critic: Any) -> dict[str, int]:
    weights, state = list(critic.parameters().values()), critic.optimizer.tensors()
    own = {p.untyped_storage()._cdata for p in weights}
    masters = [m for m in state["masters"] if m.untyped_storage()._cdata not in own]
    return {
        "critic weights": _held(*weights),
        "critic gradients": _held(*critic._gradient_buffers()),
        "critic optimizer state": _held(*masters, *state["moments"]),
    }


@pytest.mark.parametrize(
    ("dtype", "modes", "cp"),
    quick([("bfloat16", {}, 1), ("bfloat16", MODES, 1), ("float32", MODES, 1), ("bfloat16", MODES, 2)]),
    ids=["resident", "moving", "fp32", "cp2"],
)
def test_models_beside_the_policy_hold_what_the_budget_says(
    ranks: Ranks, dtype: str, modes: dict[str, bool], cp: int
) -> None:
    """On the rank that holds most. fp32 weights that come back before the optimizer's other state are part of it."""
    config = build_config(
        {
            "algorithm": {"adv_estimator": "gae"},
            "actor_rollout_ref": {"model": {"dtype": dtype}, "actor": {"fused_old_log_probs": False}},
            "critic": {"megatron": {"pipeline_model_parallel_size": 2, "context_parallel_size": cp, **modes}},
            "reward": {"name": "model"},
            "reward_model": {"megatron": {"tensor_model_parallel_size": 2, "param_offload": bool(modes)}},
            "trainer": {"n_gpus_per_node": 4},
        }
    )
    found = ranks.run(4, _bytes_in_phases, dtype, modes, cp)
    predicted = budget(job_of(config, WIDER), H200, moved=0)[0].phases
    for phase in STEP:
        items = predicted[phase]
        want = {name: items[name] for name in found[0][phase]}
        want["critic optimizer state"] += items.get("critic fp32 weights", 0)
        most = {name: max(held[phase][name] for held in found) for name in want}
        assert most == pytest.approx(want, rel=0.01), phase

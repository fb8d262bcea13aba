"""What an actor holds and reports, beside the numbers that it trains with."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ranks import Ranks
from training_cases import ARCH, SEQUENCES, Case, actor_in, beside, fixed_batch, micro_batches_of, update


def one_optimizer_at_a_time() -> list[bool]:
    """Whether the first optimizer is gone while the second is built, and once it is."""
    from megarl.config.policy import Optim
    from megarl.roles import optimizer as module

    alive = []
    with actor_in(Case()) as actor:
        first = weakref.ref(actor.optimizer._adam)
        build = module.get_megatron_optimizer

        def watched(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            alive.append(first() is not None)
            return build(*args, **kwargs)

        module.get_megatron_optimizer = watched
        try:
            actor.restart_optimizer(Optim(), 10)
        finally:
            module.get_megatron_optimizer = build
        gc.collect()
        alive.append(first() is not None)
    return alive


def test_a_new_optimizer_finds_the_old_one_gone(ranks: Ranks) -> None:
    assert ranks.run(1, one_optimizer_at_a_time) == [[False, False]]


LEAVING = {"param_offload": True, "optimizer_offload": True}


def restarted(megatron: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights after an update with each of three optimizers; what may leave does, before and after one is made."""
    from megarl.config.policy import Optim
    from megarl.parallel.offload import storages
    from megarl.phases import Item

    with actor_in(Case(config={"actor": {"megatron": megatron}}), dtype="bfloat16", lr=1e-2) as actor:

        def leave() -> None:
            for item in (Item.WEIGHTS, Item.OPTIMIZER):
                for memory in actor.memory[item]:
                    memory.release()
            state = [tensor for tensors in actor.optimizer.tensors().values() for tensor in tensors]
            assert not megatron or sum(storage.nbytes() for storage in storages(state)) == 0

        for left_before in (True, False):
            update(actor, fixed_batch())
            if left_before:
                leave()
            actor.restart_optimizer(Optim(lr=3e-2), 10)
            leave()
        update(actor, fixed_batch())
        leave()
        actor.gather_parameters()
        return {name: p.detach().clone() for name, p in actor.parameters().items()}


def test_an_optimizer_that_leaves_is_replaced(ranks: Ranks) -> None:
    (stays,), (leaves,) = ranks.run(1, restarted, {}), ranks.run(1, restarted, LEAVING)
    assert all(torch.equal(weight, leaves[name]) for name, weight in stays.items())


def copied(megatron: dict[str, Any]) -> list[float]:
    """How far a trained model's weights are from those that were copied into it: before, at once, after an update."""
    case = Case(config={"actor": {"megatron": megatron}})

    def apart() -> float:
        other.gather_parameters()
        mine = actor.parameters()
        return max(float((p - mine[name]).abs().max()) for name, p in other.parameters().items())

    with actor_in(case, dtype="bfloat16", lr=3e-2) as actor:
        other = beside(actor, case, dtype="bfloat16", role="Actor", lr=1e-12)
        update(actor, fixed_batch())
        seen = [apart()]
        other.copy_from(actor)
        seen.append(apart())
        update(other, fixed_batch())
        return [*seen, apart()]


@pytest.mark.parametrize("megatron", [{}, {"use_distributed_optimizer": False}, LEAVING], ids=["", "whole", "leaving"])
def test_copied_weights_are_what_is_trained_on(ranks: Ranks, megatron: dict[str, Any]) -> None:
    """The optimizer's own, in float32, are copied too; a step of no length leaves everything where it is."""
    ((before, at_once, later),) = ranks.run(1, copied, megatron)
    assert before > 1e-3 and at_once == later == 0


def norms(clip_grad: float) -> list[float]:
    """The gradient norm that an update reports, and that of the gradients before it."""
    from megarl.algorithms.aggregation import token_weights
    from megarl.algorithms.cross_entropy import cross_entropy

    with actor_in(Case(), lr=1e-5, clip_grad=clip_grad) as actor:
        batch, micro_batches = fixed_batch(), micro_batches_of(actor)
        weights = token_weights(batch, range(SEQUENCES), "token-mean", 12)
        actor.accumulate_gradients(batch, micro_batches, weights, cross_entropy)
        own = torch.cat([p.main_grad.flatten() for p in actor.parameters().values()]).norm().item()
        return [update(actor, batch)["grad_norm"], own]


@pytest.mark.parametrize("clip_grad", [0.0, 1e-3, 1.0])
def test_the_gradient_norm_is_the_one_before_clipping(ranks: Ranks, clip_grad: float) -> None:
    ((reported, own),) = ranks.run(1, norms, clip_grad)
    assert reported == pytest.approx(own, rel=1e-5) and own > 0


def test_one_rotary_table_serves_all_lengths() -> None:
    from megarl.models import attention
    from megarl.models.rope import rope_table

    device = torch.device("cpu")
    attention._ROPE.clear()
    for length in (3, 1000, 5000, 2000):
        assert torch.equal(attention._cached_rope(ARCH, length, device), rope_table(ARCH, length, device))
    assert [len(table) for table in attention._ROPE.values()] == [5120]

"""What an actor holds and reports, beside the numbers that it trains with."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ranks import Ranks
from training_cases import ARCH, SEQUENCES, Case, actor_in, beside, fixed_batch, mini_batch_of, update

from megarl.models.fill import fill, random_source
from megarl.models.parameter_names import ParameterNames
from megarl.models.weights import logical_tensors, training_placements
from megarl.parallel.layout import TrainLayout


def one_optimizer_at_a_time() -> list[bool]:
    """Whether the first optimizer is gone while the second is built, and once it is."""
    from megarl.config.policy import OptimConfig
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
            actor.restart_optimizer(OptimConfig(), 10)
        finally:
            module.get_megatron_optimizer = build
        gc.collect()
        alive.append(first() is not None)
    return alive


@pytest.mark.slow
def test_a_new_optimizer_finds_the_old_one_gone(ranks: Ranks) -> None:
    assert ranks.run(1, one_optimizer_at_a_time) == [[False, False]]


LEAVING = {"param_offload": True, "optimizer_offload": True}


def restarted(megatron: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights after an update with each of three optimizers; what may leave does, before and after one is made."""
    from megarl.config.policy import OptimConfig
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
            actor.restart_optimizer(OptimConfig(lr=3e-2), 10)
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
        batch, mini_batch = fixed_batch(), mini_batch_of(actor)
        weights = token_weights(batch, range(SEQUENCES), "token-mean", 12)
        actor.accumulate_gradients(batch, mini_batch, weights, cross_entropy)
        own = torch.cat([p.main_grad.flatten() for p in actor.parameters().values()]).norm().item()
        return [update(actor, batch)["grad_norm"], own]


@pytest.mark.parametrize("clip_grad", [0.0, 1e-3, 1.0])
def test_the_gradient_norm_is_the_one_before_clipping(ranks: Ranks, clip_grad: float) -> None:
    ((reported, own),) = ranks.run(1, norms, clip_grad)
    assert reported == pytest.approx(own, rel=1e-5) and own > 0


def partly_frozen(case: Case, dtype: str) -> tuple[list[bool], dict[str, set[str]], list[int]]:
    """Trains all but the embedding, which is the output layer, too, and the first layer.

    Returns:
        whether each parameter kept its bits through two updates, before which the weights left; the names of the
        parameters with fp32 weights in a checkpoint, and of those that are trained; and the bytes that are said to be
        saved, with those of weights, and of trained ones with their state.
    """
    from megarl.phases import Item
    from megarl.roles.trained import Actor
    from megarl.roles.writers import parameters_in

    class PartlyFrozen(Actor):
        def make_chunks(self) -> list[Any]:
            chunks = super().make_chunks()
            for chunk in chunks:
                chunk.embedding.requires_grad_(False)
                chunk.decoder.layers[0].requires_grad_(False)
            return chunks

    with actor_in(case, dtype=dtype, role=PartlyFrozen, lr=1e-2) as actor:
        before = {name: p.detach().clone() for name, p in actor.parameters().items()}
        losses = []
        for _ in range(2):
            for item in (Item.WEIGHTS, Item.OPTIMIZER):
                for memory in actor.memory[item]:
                    memory.release()
            losses.append(update(actor, fixed_batch())["loss"])
        assert losses[1] < losses[0]
        actor.gather_parameters()
        parameters = actor.parameters()
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        same = [torch.equal(p, before[name]) != p.requires_grad for name, p in parameters.items()]
        chunk = actor.chunks[0]
        state = actor.sharded_state(loading=False)
        names = {id(p): name for name, p in chunk.named_parameters()}
        stored = [names[id(weight.data)] for weight in parameters_in(state["model0"])]
        steps = {stored[index] for index in state["optimizer"]["state"]}
        replicas = actor.groups.layout.dp
        weights = sum(p.nbytes // replicas for p in parameters.values())
        expected = weights + 12 * sum(p.numel() // replicas for p in trained.values())
        sizes = [actor.saved_bytes(), expected, actor.saved_bytes(optimizer=False), weights]
        return same, {"state": steps, "trained": {name.removeprefix("0.") for name in trained}}, sizes


OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("dp", "dtype", "megatron"),
    [
        (1, "float32", {}),
        (1, "bfloat16", {"use_distributed_optimizer": False}),
        (1, "bfloat16", LEAVING),
        (2, "float32", OVERLAPS),
    ],
    ids=["", "whole", "leaving", "overlapping"],
)
def test_parameters_need_not_be_trained(ranks: Ranks, dp: int, dtype: str, megatron: dict[str, Any]) -> None:
    """They stay as they are, also where trained ones are rebuilt from the optimizer's, and have no moments."""
    case = Case(dp=dp, config={"actor": {"megatron": megatron}})
    results = ranks.run(dp, partly_frozen, case, dtype)
    for same, names, (said, expected, said_without, weights) in results:
        assert all(same) and names["state"] <= names["trained"]
        assert said == expected and said_without == weights
    assert set().union(*(names["state"] for _, names, _ in results)) == results[0][1]["trained"]


def test_one_rotary_table_serves_all_lengths() -> None:
    from megarl.models import attention
    from megarl.models.rope import rope_table

    device = torch.device("cpu")
    kind = ARCH.layer(0).attention
    attention._ROPE.clear()
    for length in (3, 1000, 5000, 2000):
        assert torch.equal(attention._cached_rope(kind, length, device), rope_table(kind, length, device))
    assert [len(table) for table in attention._ROPE.values()] == [5120]


def copied_under_other_names() -> list[bool]:
    """Whether a model whose norms are called as in Transformer Engine's layers gives all its weights to this one, and
    this one its own to such a one."""
    from megarl.reshard.copying import copy_weights
    from megarl.reshard.sides import training_side

    with actor_in(Case(tp=2)) as actor:
        ours, world = actor.parameters(), actor.groups.world
        there = training_side(actor.arch, actor.groups.layout, ParameterNames(fused_norms=True))
        called = {(place.tensor, place.box): place.param for place in actor.side.placements(world.rank)}
        other = {
            place.param: ours[called[place.tensor, place.box]].detach().clone()
            for place in there.placements(world.rank)
        }
        assert other.keys() != ours.keys() and other.keys() - ours.keys()
        before = {name: weight.detach().clone() for name, weight in ours.items()}
        with torch.no_grad():
            for weight in ours.values():
                weight.zero_()
        copy_weights(there, other, actor.side, ours, world)
        same = [torch.equal(ours[name], weight) for name, weight in before.items()]
        whole = {name: weight.clone() for name, weight in other.items()}
        for weight in other.values():
            weight.zero_()
        copy_weights(actor.side, ours, there, other, world)
        return [*same, *(torch.equal(other[name], weight) for name, weight in whole.items())]


def test_weights_are_copied_whatever_the_layers_call_them(ranks: Ranks) -> None:
    """Norms that were skipped since they have another name stayed zero, and were trained from there."""
    assert all(all(result) for result in ranks.run(2, copied_under_other_names))


def test_a_parameter_that_no_weight_fills_is_a_fault() -> None:
    arch = ARCH
    layout = TrainLayout(ranks=range(1))
    placements = list(training_placements(arch, layout, 0))
    shapes: dict[str, tuple[int, ...]] = {}
    for place in placements:
        rows, columns = shapes.get(place.param, (0, 0))
        shapes[place.param] = (max(rows, place.rows[1]), place.columns)
    rows, columns = shapes["0.embedding.word_embeddings.weight"]
    shapes["0.embedding.word_embeddings.weight"] = (rows + 3, columns)  # padding
    parameters = {name: torch.ones(shape) for name, shape in shapes.items()}
    source, tensors = random_source(arch, 1), logical_tensors(arch)
    fill(parameters, placements, tensors, source)
    assert not parameters["0.embedding.word_embeddings.weight"][-3:].any()
    with pytest.raises(AssertionError, match=r"linear_fc1\.bias has elements that no weight of the model fills"):
        fill({**parameters, "0.decoder.layers.0.mlp.linear_fc1.bias": torch.ones(4)}, placements, tensors, source)
    without_keys = [place for place in placements if "layers.1.self_attn.k_proj" not in place.tensor]
    with pytest.raises(AssertionError, match=r"layers\.1\.\S+linear_qkv\.weight has elements that no weight"):
        fill(parameters, without_keys, tensors, source)
    with pytest.raises(AssertionError, match=r"has elements of two boxes"):
        fill(parameters, [*placements, placements[3]], tensors, source)

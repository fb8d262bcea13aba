"""An actor and a critic over the same ranks, each in a training layout of its own: each trains as if it were alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from selection import quick
from small_state import STATE, rl_step
from training_cases import (
    ARCH,
    WITH_EXPERTS,
    Case,
    Squares,
    actor_in,
    beside,
    fixed_batch,
    layout_of,
    mini_batch_of,
    save_checkpoint,
    update,
    with_targets,
)

from megarl.config.policy import BatchingConfig
from megarl.models.architecture import Architecture
from megarl.parallel.layout import TrainLayout

STEPS = 3
ROLES = {"Actor": "log_probs", "Critic": "values"}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The layouts of an actor and the critic beside it."""

    actor: Case
    critic: Case
    arch: Architecture = ARCH

    @property
    def name(self) -> str:
        return f"{self.actor.name}-beside-{self.critic.name}" + "-experts" * (self.arch is WITH_EXPERTS)


OVERLAP = {"actor": {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}}
RECOMPUTE = {"model": {"dtype": "float32", "enable_gradient_checkpointing": True}}
SQUARE = Case(tp=2, pp=2)
PAIRS = [
    Pair(actor=SQUARE, critic=Case(tp=4, sequence_parallel=True, config=RECOMPUTE)),
    Pair(actor=Case(pp=2, dp=2, chunks=2), critic=Case(tp=2, dp=2, config=OVERLAP)),
    Pair(actor=Case(tp=2, cp=2, sequence_parallel=True), critic=Case(cp=4)),
    Pair(actor=Case(dp=4), critic=Case(tp=2, pp=2, sequence_parallel=True), arch=WITH_EXPERTS),
    Pair(actor=Case(dp=4, ep=2), critic=Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True), arch=WITH_EXPERTS),
]

History = list[tuple[torch.Tensor, float, float]]
"""Of each step what the model says before it, its loss and the norm of its gradient."""


def _outputs(model: Any) -> torch.Tensor:
    outputs: torch.Tensor = getattr(model, ROLES[type(model).__name__])(fixed_batch(), mini_batch_of(model))
    return outputs


def _step(model: Any) -> tuple[float, float]:
    loss = Squares("advantages") if type(model).__name__ == "Critic" else None
    metrics = update(model, with_targets(), loss)
    return metrics["loss"], metrics["grad_norm"]


def _alone(case: Case, role: str, arch: Architecture) -> History:
    with actor_in(case, arch, role=role, lr=3e-3) as model:
        return [(_outputs(model), *_step(model)) for _ in range(STEPS)]


def _together(pair: Pair) -> dict[str, History]:
    """Both, a pass or a step of one after that of the other."""
    with actor_in(pair.actor, pair.arch, lr=3e-3) as actor:
        models = {"Actor": actor, "Critic": beside(actor, pair.critic, pair.arch, lr=3e-3)}
        histories: dict[str, History] = {role: [] for role in models}
        for _ in range(STEPS):
            outputs = {role: _outputs(model) for role, model in models.items()}
            for role, model in models.items():
                histories[role].append((outputs[role], *_step(model)))
        return histories


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[tuple[Architecture, str], History]:
    """Each model alone on one rank."""
    wanted = [(arch, role) for arch in (ARCH, WITH_EXPERTS) for role in ROLES]
    return {(arch, role): ranks.run(1, _alone, Case(), role, arch)[0] for arch, role in wanted}


@pytest.mark.parametrize(
    "pair",
    quick([Pair(actor=SQUARE, critic=Case(dp=4)), *PAIRS]),
    ids=lambda pair: pair.name,
)
def test_both_train_as_on_one_rank(ranks: Ranks, plain: dict[Any, History], pair: Pair) -> None:
    for histories in ranks.run(4, _together, pair):
        for role, history in histories.items():
            want = plain[pair.arch, role]
            assert want[-1][1] < want[0][1]
            torch.testing.assert_close(history[0][0], want[0][0], rtol=0, atol=1e-5)
            for ours, theirs in zip(history, want, strict=True):
                assert ours[1:] == pytest.approx(theirs[1:], rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS[1:], ids=lambda pair: pair.name)
def test_neither_changes_a_bit_of_the_other(ranks: Ranks, pair: Pair) -> None:
    """Each gives what it gives alone in the same layout."""
    together = ranks.run(4, _together, pair)
    for role, case in (("Actor", pair.actor), ("Critic", pair.critic)):
        for alone, both in zip(ranks.run(4, _alone, case, role, pair.arch), together, strict=True):
            for ours, theirs in zip(both[role], alone, strict=True):
                assert torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]


# ------------------------------------------------------------------------------------------------------ checkpoints


def _held(model: Any) -> list[torch.Tensor]:
    """This rank's weights and optimizer state."""
    model.gather_parameters()
    tensors = [*model.parameters().values(), *(t for part in model.optimizer.tensors().values() for t in part)]
    return [tensor.detach().clone() for tensor in tensors]


def _save(models: dict[str, Any], run_dir: str, step: int) -> str:
    state = {name: model.sharded_state(f"{name}.", loading=False) for name, model in models.items()}
    world = models["critic"].groups.world
    return save_checkpoint(run_dir, rl_step(step), state, STATE, model_files=lambda folder: None, world=world)


def _load(models: dict[str, Any], folder: str) -> None:
    from megarl.checkpoint.store import load_checkpoint

    wanted = {name: model.sharded_state(f"{name}.", loading=True) for name, model in models.items()}
    loaded = load_checkpoint(folder, wanted, rng=False, world=models["critic"].groups.world)
    for name, model in models.items():
        model.load_sharded(loaded[name], f"{name}.")


def _of_critic(folder: str) -> dict[str, torch.Tensor]:
    """Its tensors in a checkpoint."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(folder)
    return {key: value for key, value in loaded.items() if "critic." in key and isinstance(value, torch.Tensor)}


def _save_and_load(pair: Pair, other: Case, run_dir: str) -> dict[str, Any]:
    """Whether a checkpoint brings back state and next step of both, and the critic in another layout."""
    found: dict[str, Any] = {}
    with actor_in(pair.actor, lr=3e-3) as actor:
        models = {"actor": actor, "critic": beside(actor, pair.critic, lr=3e-3)}
        for model in models.values():
            _step(model)
        folder = _save(models, run_dir, 1)
        saved = {name: _held(model) for name, model in models.items()}
        following = {name: _step(model) for name, model in models.items()}
        _load(models, folder)
        for name, model in models.items():
            pairs = zip(saved[name], _held(model), strict=True)
            found[name] = len(saved[name]), all(torch.equal(*pair) for pair in pairs), _step(model) == following[name]
        elsewhere = {"critic": beside(actor, other, lr=3e-3)}
        _load(elsewhere, folder)
        first, second = _of_critic(folder), _of_critic(_save(elsewhere, run_dir, 2))
        assert first.keys() == second.keys()
        # the vocabulary is padded to a multiple of the tensor-parallel size
        rows = {key: min(len(first[key]), len(second[key])) for key in first}
        same = all(torch.equal(first[key][:n], second[key][:n]) for key, n in rows.items())
        found["elsewhere"] = len(first), same, _step(elsewhere["critic"]), following["critic"]
    return found


@pytest.mark.slow
def test_a_checkpoint_of_both(ranks: Ranks, tmp_path: Path) -> None:
    pair, other = Pair(actor=SQUARE, critic=Case(dp=4)), Case(tp=2, dp=2, sequence_parallel=True)
    parameters = 9 + 3  # the same one of all layers is one tensor; embedding, last norm, output
    for found in ranks.run(4, _save_and_load, pair, other, str(tmp_path)):
        for name in ("actor", "critic"):
            tensors, same, goes_on = found[name]
            assert tensors > 0 and same and goes_on
        tensors, same, ours, theirs = found["elsewhere"]
        assert tensors == 4 * parameters and same
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


# ---------------------------------------------------------------------------------------------------- micro-batches

TWO_AT_A_TIME = BatchingConfig(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=2)


def _plans(pair: Pair) -> dict[str, Any]:
    """Micro-batches of both models."""
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World
    from megarl.roles.passes import plan_passes

    world = World()
    plans = {
        role: plan_passes(fixed_batch(), layout, world, batching=TWO_AT_A_TIME, balance=True, sequences=8).mini_batches
        for role, layout in (("Actor", layout_of(pair.actor)), ("Critic", layout_of(pair.critic)))
    }
    plans = {role: [replace(mini_batch, owners=None) for mini_batch in plan] for role, plan in plans.items()}
    world.all_gather(None)  # a rank that leaves its groups at once breaks off those that are still joining
    leave_groups(world)
    return plans


def test_each_layout_has_its_micro_batches(ranks: Ranks) -> None:
    """The data-parallel ranks of a layout share the sequences, and the others of it have the same ones."""
    pair = Pair(actor=Case(tp=2, dp=2), critic=Case(pp=2, dp=2, chunks=2))
    found = ranks.run(4, _plans, pair)
    for role, case in (("Actor", pair.actor), ("Critic", pair.critic)):
        layout = TrainLayout(ranks=range(4), tp=case.tp, pp=case.pp, chunks=case.chunks)
        plans = [plan[role] for plan in found]
        for rank, other in itertools.combinations(range(4), 2):
            same = layout.coords(rank).dp == layout.coords(other).dp
            assert (plans[rank] == plans[other]) == same
        for k in range(2):
            shares = [plans[layout.rank(tp=0, dp=dp, pp=0)][k].micro_batches for dp in range(2)]
            held = [i for share in shares for micro in share for i in micro]
            assert sorted(held) == list(range(8 * k, 8 * k + 8))


def _scored_by_a_plan_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, str]]:
    """Scores of a reward model TP1 x DP4 beside an actor: by its own plan, by that of another model of its layout, and
    what it says to the actor's."""
    with actor_in(case) as actor:
        judge = beside(actor, Case(dp=4), role="RewardModel")
        with torch.no_grad():
            judge.output_weight(judge.chunks[-1]).fill_(0.5)
        batch, plan = fixed_batch(), actor.plan(fixed_batch())
        calls = {
            "scores": lambda: judge.scores(batch, plan),
            "evaluate": lambda: judge.evaluate(batch, plan, Squares("rewards")),
            "update": lambda: judge.update(batch, plan.mini_batches[0], Squares("rewards")),
        }
        refusals = {}
        for name, call in calls.items():
            with pytest.raises(ValueError) as refusal:
                call()
            refusals[name] = str(refusal.value)
        critic = beside(actor, Case(dp=4))
        return judge.scores(batch, judge.plan(batch)), judge.scores(batch, critic.plan(batch)), refusals


def test_a_plan_of_another_layout_is_refused(ranks: Ranks) -> None:
    """With the actor's plan two ranks would pass each sequence: every score would be twice as large."""
    for own, shared, refusals in ranks.run(4, _scored_by_a_plan_of, Case(tp=2, dp=2)):
        assert float(own.abs().min()) > 0
        torch.testing.assert_close(own, shared, rtol=0, atol=0)
        for text in refusals.values():
            assert "planned for TP2 x PP1 x DP2, and the RewardModel has TP1 x PP1 x DP4" in text
            assert "pass what its own plan(batch) gives" in text


def _copied(pair: Pair) -> tuple[bool, torch.Tensor, torch.Tensor, int, int]:
    """Whether weights that went into another layout and back are the same bits; what both models say; elements that
    this rank was sent for the first of these copies, and those that it wanted and had not."""
    import torch.distributed as dist

    from megarl.models.tensors import intersect, volume
    from megarl.models.weights import logical_tensors

    sent, send = 0, dist.all_to_all_single

    def counted(received: torch.Tensor, *rest: Any, **named: Any) -> None:
        nonlocal sent
        sent += len(received)
        send(received, *rest, **named)

    with actor_in(pair.actor, pair.arch, lr=3e-3) as actor:
        other, back = (beside(actor, case, pair.arch, role="Actor", lr=3e-3) for case in (pair.critic, pair.actor))
        for model in (actor, other, back):
            _step(model)  # away from what all begin with
        dist.all_to_all_single = counted
        try:
            other.copy_from(actor)
        finally:
            dist.all_to_all_single = send
        both = _outputs(actor), _outputs(other)
        rank, tensors = actor.groups.world.rank, logical_tensors(pair.arch)
        has = {(place.tensor, place.box) for place in actor.side.placements(rank)}
        wanted = 0
        for place in other.side.placements(rank):
            parts = (intersect(box, place.box) for tensor, box in has if tensor == place.tensor)
            wanted += (place.tensor in tensors) * volume(place.box) - sum(volume(part) for part in parts if part)
        _step(back)
        back.copy_from(other)
        actor.gather_parameters()
        back.gather_parameters()
        same = all(torch.equal(p, back.parameters()[name]) for name, p in actor.parameters().items())
        return same, *both, sent, wanted


@pytest.mark.parametrize("pair", quick(PAIRS, 1), ids=lambda pair: pair.name)
def test_a_copy_into_another_layout_sends_each_rank_what_it_lacks(ranks: Ranks, pair: Pair) -> None:
    """Not the whole model to every rank."""
    for same, ours, theirs, sent, wanted in ranks.run(4, _copied, pair):
        assert same and sent == wanted
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

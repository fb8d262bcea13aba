"""A batch of whose tokens each rank has some gives the same numbers as one that every rank has all of."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from selection import quick
from torch import Tensor

from megarl.algorithms import over_tokens
from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.declaration import about_of
from megarl.algorithms.loss import prepared
from megarl.algorithms.losses.clip_cov import clip_cov
from megarl.algorithms.losses.kl_cov import kl_cov
from megarl.algorithms.registry import ESTIMATORS
from megarl.algorithms.returns import explained_variance, value_targets
from megarl.algorithms.rollout_correction import correct_rollouts, gap_metrics, without_truncated
from megarl.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from megarl.config.policy import ActorConfig
from megarl.parallel.layout import TrainLayout
from megarl.types import Batch, batch_of
from megarl.types.owners import Owners

WORLD = 4
SEQUENCES = 23


def whole_batch(seed: int) -> Batch:
    """Sequences with every column: some have no trained token, some groups one response."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompts = [[rng.randrange(99) for _ in range(rng.randrange(1, 5))] for _ in range(SEQUENCES)]
    responses = [[rng.randrange(99) for _ in range(rng.choice([0, 1, 2, 9, 40]))] for _ in range(SEQUENCES)]
    batch = batch_of(prompts, responses, [i // 3 for i in range(SEQUENCES)])
    mask = batch.response_mask & (torch.rand(len(batch.tokens), generator=generator) < 0.8)

    def column(scale: float = 1.0) -> Tensor:
        return torch.where(mask, torch.randn(len(batch.tokens), generator=generator) * scale, 0.0)

    logp, experts = column(), torch.randint(0, 9, (len(batch.tokens), 3, 2), generator=generator)
    scores = torch.randn(SEQUENCES, generator=generator)
    return batch.with_(
        response_mask=mask,
        rewards=scores,
        greedy_rewards=scores.roll(1),
        truncated=scores > 1,
        rollout_logp=logp,
        old_logp=logp + column(0.1),
        ref_logp=logp + column(0.2),
        teacher_logp=column(),
        values=column(),
        staleness=(column() > 0).long(),
        routed_experts=experts.to(torch.uint8),
        routed=mask,
    ).with_columns(mine=column(), of_sequences=scores * 2)


def columns_of(batch: Batch) -> dict[str, Tensor]:
    """All that is filled, by name; the tokens of this rank alone."""
    columns = {**vars(batch), **batch.token_columns, **batch.sequence_columns}
    fields = {name for name, _ in vars(Batch)["__dataclass_fields__"].items()} | {"mine", "of_sequences"}
    return {name: x for name, x in columns.items() if name in fields and isinstance(x, Tensor)}


def owners_of(seed: int, world: Any) -> Owners:
    """Random blocks of ranks, of which some have nothing and some are left out."""
    rng = random.Random(seed)
    ranks = rng.sample(range(WORLD), WORLD)
    cuts = sorted(rng.sample(range(1, WORLD + 1), rng.randrange(1, WORLD + 1)))
    blocks = tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], cuts, strict=False))
    block_of = torch.tensor([rng.randrange(len(blocks)) for _ in range(SEQUENCES)])
    return Owners(block_of=block_of, blocks=blocks, ranks=world)


def in_a_world(check: Callable[[Any], Any]) -> Any:
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World

    world = World()
    result = check(world)
    world.all_gather(None)  # a rank that leaves its groups breaks off those that are still in them
    leave_groups(world)
    return result


# ------------------------------------------------------------------------------------------------------------ tokens


def _send(world: Any, seeds: range) -> None:
    from megarl.types import owners as module

    at_once = module._AT_ONCE
    for seed in seeds:
        module._AT_ONCE = at_once if seed % 2 else 64  # a few bytes: several sequences, or one, at a time
        whole = whole_batch(seed)
        batch, everything = whole, columns_of(whole)
        for step in range(3):
            owners = owners_of(100 * seed + step, world)
            batch = batch.held_by(owners)
            tokens = torch.isin(whole.sequence_of_token, owners.own)
            assert torch.equal(batch.sequence_of_token, whole.sequence_of_token[tokens])
            held = columns_of(batch)
            assert held.keys() == everything.keys()
            for name, column in everything.items():
                wanted = column if len(column) <= SEQUENCES + 1 else column[tokens]
                assert torch.equal(held[name], wanted) and held[name].dtype == column.dtype, name
            for i in owners.own.tolist():
                own, there = int(batch.starts[i]), int(whole.starts[i])
                assert torch.equal(
                    batch.tokens[own : own + int(batch.lengths[i])], whole.tokens[there:][: whole.lengths[i]]
                )
        again = columns_of(batch.everywhere())
        assert all(torch.equal(again[name], column) for name, column in everything.items())
        few = whole.held_by(owners_of(seed, world), ("tokens", "mine"))
        assert few.response_mask is None and few.values is None and few.token_columns.keys() == {"mine"}
    module._AT_ONCE = at_once


@pytest.mark.parametrize("seeds", quick([range(12), range(12, 30)], 0), ids=str)
def test_tokens_come_where_they_are_wanted(ranks: Ranks, seeds: range) -> None:
    """From random blocks of ranks to others, and back to all: every column, of every type and shape."""
    ranks.run(WORLD, in_a_world, partial(_send, seeds=seeds))


# ----------------------------------------------------------------------------------------------------------- numbers


def user_estimator(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Knows nothing of shares: the place of each token among all of the batch's."""
    return torch.arange(len(batch.tokens)).float() - float(batch.trained(batch.values).mean())


def _numbers(batch: Batch) -> Iterator[tuple[str, Any]]:
    """What is computed of a batch, by name: a batch, a column of tokens or of sequences, or a number."""
    for name in ESTIMATORS.names():
        assert about_of(ESTIMATORS.load(name)).sharded
        for in_reward in (False, True):
            config = AlgorithmConfig(adv_estimator=name, use_kl_in_reward=in_reward, gamma=0.9, lam=0.8)
            yield f"{name}, KL in reward: {in_reward}", compute_advantages(batch, config, 0.1)
    config = AlgorithmConfig(adv_estimator=f"{__file__}:user_estimator")
    yield "a user's estimator", compute_advantages(batch, config, 0.1)
    batch = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo"), 0.1)
    for level in ("token", "sequence", "geometric"):
        for normalized in (False, True):
            weighs = {} if level == "geometric" else {"rollout_is": level, "rollout_is_batch_normalize": normalized}
            corrected = correct_rollouts(
                batch, RolloutCorrectionConfig(**weighs, rollout_rs=level, rollout_rs_threshold=1.05)
            )
            yield f"importance per {level}", corrected
            yield f"gap with importance per {level}", gap_metrics(corrected)
    vetoed = correct_rollouts(batch, RolloutCorrectionConfig(rollout_token_veto_threshold=0.9))
    yield "veto", vetoed
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield mode, token_weights(without_truncated(vetoed), range(3, 19), mode, 40)
    yield "gap", gap_metrics(batch)
    batch = batch.with_(returns=value_targets(batch, gamma=0.9, lam=0.8))
    yield "returns", batch
    yield "explained variance", explained_variance(batch)
    for make in (clip_cov, kl_cov):
        yield make.__name__, prepared(make(ActorConfig()), vetoed, range(2, 20))


def _compare(world: Any) -> int:
    compared = 0
    for seed in range(3):
        whole = whole_batch(seed)
        owners = owners_of(seed, world)
        batch, tokens = whole.held_by(owners), torch.isin(whole.sequence_of_token, owners.own)
        for (name, mine), (_, wanted) in zip(_numbers(batch), _numbers(whole), strict=True):
            if isinstance(wanted, Batch):
                mine, wanted = columns_of(mine), columns_of(wanted)
                assert mine.keys() == wanted.keys()
            elif isinstance(wanted, Tensor):
                mine, wanted = {"": mine}, {"": wanted}
            for key, value in wanted.items() if isinstance(wanted, dict) else [("", wanted)]:
                got = mine[key] if isinstance(mine, dict) else mine
                if isinstance(value, Tensor):
                    value = value if len(value) <= SEQUENCES + 1 else value[tokens]
                    assert torch.equal(got, value), (seed, name, key)
                else:
                    assert got == value, (seed, name, key)
                compared += 1
    return compared


def test_numbers_are_those_of_a_batch_that_every_rank_has(ranks: Ranks) -> None:
    """To the last bit: every estimator, corrections, weights of the loss, metrics, targets of the critic."""
    assert min(ranks.run(WORLD, in_a_world, _compare)) > 500


def test_percentiles_are_those_of_sorted_numbers() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 17, 1000):
        numbers = np.concatenate([rng.standard_normal(n), [0.0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, 3.5, 3.5]])
        x = torch.from_numpy(rng.permutation(numbers).astype(np.float32))
        batch = batch_of([()], [range(len(x))], [0])
        wanted = [float(x.sort().values[round((len(x) - 1) * percent / 100)]) for percent in range(101)]
        assert over_tokens.percentiles(batch, x, tuple(range(101))) == wanted
    signed = torch.tensor([0xFFC00000, 0]).to(torch.uint32).view(torch.float32)
    least, largest = over_tokens.percentiles(batch_of([()], [range(2)], [0]), signed, (0, 100))
    assert least == 0 and math.isnan(largest)


def _add_columns(world: Any) -> None:
    batch = batch_of([[1]] * 3, [[], [2], [2, 3, 4]], range(3))
    owners = Owners(block_of=torch.tensor([0, 0, 1]), blocks=((0,), (1,)), ranks=world)
    batch = batch.held_by(owners)
    assert len(batch.tokens) == (3, 4)[world.rank] and len(batch) == 3
    batch = batch.with_columns(mine=batch.tokens.float(), of_sequences=torch.arange(3.0))
    assert batch.token_columns.keys() == {"mine"} and batch.sequence_columns.keys() == {"of_sequences"}
    whole = batch.with_columns(later=torch.zeros(3)).everywhere()
    assert torch.equal(whole.token_columns["mine"], whole.tokens.float()) and whole.token_columns.keys() == {"mine"}


def test_a_rank_with_as_many_tokens_as_sequences_sorts_columns_as_the_others_do(ranks: Ranks) -> None:
    ranks.run(2, in_a_world, _add_columns)


# ------------------------------------------------------------------------------------------------------------- bytes


def _shares(size: int) -> list[int]:
    return [1 << i for i in range(size.bit_length())]


def _bytes(world: Any) -> dict[str, int]:
    from megarl.config.policy import BatchingConfig
    from megarl.roles.passes import plan_passes

    batch, bytes_of = whole_batch(1), {}
    for layout in (TrainLayout(ranks=range(world.size), tp=world.size // dp) for dp in _shares(world.size)):
        batching = BatchingConfig(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=2)
        plan = plan_passes(batch, layout, world, batching=batching, balance=True)
        held = columns_of(batch.held_by(plan.owners))
        bytes_of[str(layout)] = sum(x.nbytes for x in held.values() if len(x) > SEQUENCES + 1)
    return bytes_of


@pytest.mark.parametrize("size", quick([4, 8], 0))
def test_bytes_fall_with_the_data_parallel_size(ranks: Ranks, size: int) -> None:
    """Balanced lengths: each of 2, 4 and 8 shares has its part, but for the longest sequence."""
    of_ranks = ranks.run(size, in_a_world, _bytes)
    whole = whole_batch(1)
    of_token = sum(x.nbytes for x in columns_of(whole).values() if len(x) > SEQUENCES + 1) // len(whole.tokens)
    longest = int(whole.lengths.max()) * of_token
    for dp, of_layout in zip(_shares(size), zip(*(x.values() for x in of_ranks), strict=True), strict=True):
        assert sum(of_layout) == size // dp * len(whole.tokens) * of_token
        assert max(of_layout) <= len(whole.tokens) * of_token // dp + (longest if dp > 1 else 0)

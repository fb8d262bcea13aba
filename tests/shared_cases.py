"""Engines that read the actor's own parameters, inside the pool's ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from full_weights import fill_engine, random_weights, source_of
from torch import Tensor
from training_cases import Case, actor_in, hybrid_of

from megarl.models.architecture import Architecture
from megarl.types import Batch, Prompt, Rollout, SamplingParams

PROMPTS = [Prompt(index=i, token_ids=(3 + i, 5, 7, *range(20, 20 + 3 * i)), row={}) for i in range(5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank has seen.

    Attributes:
        completions: greedy, for each set of weights.
        own: the engine's parameters that are not the actor's.
        own_bytes, copied, received: of those; and what a reshard copies within the rank and receives.
        gap: largest mean distance of the engine's log-probabilities from the training layout's.
    """

    completions: list[list[Rollout]]
    own: set[str]
    own_bytes: int
    copied: int
    received: int
    gap: float


def generate_with_shared_weights(case: Case, arch: Architecture, dtype: str, share: bool) -> Seen:
    """Greedy completions with three sets of weights, written into the actor's parameters in place, the engine asleep.

    Each time the engine's parameters are compared with the logical tensors, and the actor's weights with what they
    were before the engine was built, woke and went to sleep; all bit for bit.
    """
    if not share:
        case = replace(case, config=case.config | {"actor": {"megatron": {"param_offload": True}}})
    with actor_in(case, arch, dtype) as actor:
        held = actor.parameters()
        addresses = {name: p.data_ptr() for name, p in held.items()}
        before = _copies(held)
        hybrid = hybrid_of(actor, max_model_len=64)
        _assert_same(held, before)
        engine = hybrid.engine.parameters()
        storages = {p.untyped_storage().data_ptr() for p in held.values()}
        own = {name for name, p in engine.items() if p.untyped_storage().data_ptr() not in storages}
        assert own == engine.keys() - hybrid.sync.shared.places.keys()
        assert not any(p.requires_grad for p in engine.values())
        r = hybrid.groups.tp_rank
        completions, gap = [], 0.0
        for seed in (1, 2, 3):
            full = {name: 0.3 * weight for name, weight in random_weights(arch, seed).items()}
            actor.load(source_of(full))
            before = _copies(held)
            with hybrid.phase():
                engine = hybrid.engine.parameters()
                wanted = {name: torch.empty_like(p) for name, p in engine.items()}
                fill_engine(wanted, arch, full, case.gen_tp, r)
                _assert_same(engine, wanted)
                made = hybrid.rollouts(PROMPTS, 1, GREEDY, seed=1, round_=seed)
                completions.append(list(made.items))
                _assert_same(engine, wanted)
            _assert_same(held, before)
            gap = max(gap, _gap(actor, made.to_batch()))
        assert not share or {name: p.data_ptr() for name, p in held.items()} == addresses
        moved = hybrid.sync.resharder.statistics
        hybrid.close()
        _assert_same(held, before)
        return Seen(
            completions=completions,
            own=own,
            own_bytes=sum(engine[name].nbytes for name in own),
            copied=moved.local,
            received=moved.received,
            gap=gap,
        )


def _gap(actor: Any, made: Batch) -> float:
    assert made.rollout_logp is not None
    return float((actor.log_probs(made, actor.plan(made)) - made.rollout_logp)[made.response_mask].abs().mean())


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in tensors.items()}


def _assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Where `wanted` is not NaN, which stands for vocabulary padding."""
    for name, p in wanted.items():
        known = ~p.isnan()
        assert torch.equal(got[name][known], p[known]), name


def move_a_parameter(case: Case, arch: Architecture) -> str:
    """What the hybrid engine says when a training parameter has moved."""
    with actor_in(case, arch) as actor:
        hybrid = hybrid_of(actor, max_model_len=32)
        with hybrid.phase():
            pass
        parameter: Any = actor.parameters()[hybrid.sync.shared.places["model.norm.weight"].source]
        parameter.data = parameter.data.clone()
        try:
            with hybrid.phase():
                return ""
        except AssertionError as error:
            return str(error)
        finally:
            hybrid.close()

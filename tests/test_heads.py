"""Values and scores: against `transformers`, and the same training in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from full_weights import random_weights, source_of
from hugging_face import hugging_face
from ranks import Ranks
from selection import quick
from tiny_families import ARCHITECTURES
from training_cases import SEQUENCES, Case, Squares, actor_in, fixed_batch, mini_batch_of, update, with_targets

from megarl.algorithms.value_loss import ValueLoss
from megarl.types import Batch, batch_of

OVERLAP = {"actor": {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}}
OFFLOAD = {"actor": {"megatron": {"param_offload": True, "grad_offload": True, "optimizer_offload": True}}}
CASES = [
    Case(tp=2),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(pp=2, dp=2, chunks=2, config=OVERLAP),
    Case(dp=2, config=OFFLOAD),
    Case(tp=2, packed=False, sequence_parallel=True),
    Case(cp=2),
    Case(cp=2, dp=2, packed=False),
]
HEADS: dict[str, tuple[str, Any]] = {
    "Critic": ("values", ValueLoss(cliprange=0.5)),
    "RewardModel": ("scores", Squares("rewards")),
}
"""Role -> its outputs, and what it is trained by."""


def _train(case: Case, role: str) -> tuple[torch.Tensor, list[tuple[float, float]]]:
    """What the head says before any update, and loss and gradient norm of three.

    With the usual epsilon Adam would make whole steps of gradients that are nothing but rounding; with larger steps the
    third loss would be what is left of a difference.
    """
    method, loss = HEADS[role]
    with actor_in(case, role=role, lr=3e-4, adam_eps=1e-3) as model:
        batch = with_targets()
        before = getattr(model, method)(batch, mini_batch_of(model))
        batch = batch.with_(values=batch.advantages * 0.1, returns=batch.advantages)
        updates = [update(model, batch, loss) for _ in range(3)]
        return before, [(metrics["loss"], metrics["grad_norm"]) for metrics in updates]


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, Any]:
    """One rank, no parallelism."""
    return {role: ranks.run(1, _train, Case(), role)[0] for role in HEADS}


@pytest.mark.parametrize("role", HEADS)
@pytest.mark.parametrize("case", quick(CASES, 3), ids=lambda case: case.name + "-".join(map(str, case.config)))
def test_training_agrees_in_every_layout(ranks: Ranks, plain: dict[str, Any], case: Case, role: str) -> None:
    outputs, history = plain[role]
    assert len(outputs) == (SEQUENCES if role == "RewardModel" else len(fixed_batch().tokens)) and outputs.std() > 0
    assert history[2][0] < history[0][0]
    for got, seen in ranks.run(case.world, _train, case, role):
        torch.testing.assert_close(got, outputs, rtol=0, atol=1e-5)
        for ours, theirs in zip(seen, history, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(61, (n,), generator=generator).tolist() for n in (7, 3, 12, 5)]
    return batch_of([row[:2] for row in rows], [row[2:] for row in rows], range(4))


def _by_transformers(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the states before each response token, and scores at the last tokens."""
    model, batch = hugging_face(family), _batch()
    vector = random_weights(ARCHITECTURES[family].with_scalar_output(), 1)["score.weight"][0]
    values, scores = torch.zeros(len(batch.tokens)), []
    for start, stop in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist(), strict=False):
        with torch.no_grad():
            states = model.model(batch.tokens[None, start:stop]).last_hidden_state[0] @ vector
        values[start + 2 : stop] = states[1:-1]
        scores.append(states[-1])
    return values, torch.stack(scores)


def _by_megatron(case: Case, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    arch = ARCHITECTURES[family]
    weights, out = random_weights(arch.with_scalar_output(), 1), []
    for role, (method, _) in HEADS.items():
        with actor_in(case, arch, role=role) as model:
            model.load(source_of(weights))
            out.append(getattr(model, method)(_batch(), model.plan(_batch(), 2)))
    return out[0], out[1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("case", quick([Case(), Case(tp=2, pp=2)], 1), ids=lambda case: case.name)
def test_values_and_scores_are_those_of_transformers(ranks: Ranks, case: Case, family: str) -> None:
    etp = 1 if ARCHITECTURES[family].whole_experts else None
    case = replace(case, sequence_parallel=bool(ARCHITECTURES[family].moe) and case.tp > 1, etp=etp)
    values, scores = _by_transformers(family)
    assert min(values.std(), scores.std()) > 0.1
    for got_values, got_scores in ranks.run(case.world, _by_megatron, case, family):
        torch.testing.assert_close(got_values, values, rtol=0, atol=2e-5)
        torch.testing.assert_close(got_scores, scores, rtol=0, atol=2e-5)

"""The training layout's log-probabilities against `transformers`, from the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from full_weights import random_weights, source_of
from hugging_face import hugging_face
from ranks import Ranks
from tiny_families import ARCHITECTURES
from training_cases import Case, actor_in

from megarl.types import Batch, batch_of

CASES = [Case(), Case(tp=2), Case(pp=2), Case(tp=2, pp=2), Case(tp=4)]


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(61, (n,), generator=generator).tolist() for n in (7, 3, 12, 5)]
    return batch_of([row[:1] for row in rows], [row[1:] for row in rows], range(4))


def _hf_log_probs(family: str) -> torch.Tensor:
    model = hugging_face(family)
    batch, out = _batch(), []
    for i in range(len(batch)):
        tokens = batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0], -1)
        out.append(torch.cat([torch.zeros(1), log_p[:-1].gather(-1, tokens[1:, None])[:, 0]]))
    return torch.cat(out)


def _megatron_log_probs(case: Case, family: str) -> torch.Tensor:
    arch = ARCHITECTURES[family]
    weights = random_weights(arch, 1)
    with actor_in(case, arch) as actor:
        actor.load(source_of(weights))
        return actor.log_probs(_batch(), actor.plan(_batch(), 2))


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_log_probs(ranks: Ranks, family: str, case: Case) -> None:
    if ARCHITECTURES[family].moe and case.tp > 1:
        case = replace(case, sequence_parallel=True)
    wanted = _hf_log_probs(family)
    assert wanted.std() > 0.5
    for got in ranks.run(case.world, _megatron_log_probs, case, family):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)

"""The training layout's log-probabilities and gradients against `transformers`, from the same weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from full_weights import random_weights, source_of
from hugging_face import hugging_face
from ranks import Ranks
from safetensors.torch import load_file
from selection import quick
from tiny_families import ARCHITECTURES
from training_cases import Case, actor_in

from megarl.models.weights import logical_tensors
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
@pytest.mark.parametrize("case", quick(CASES, 3), ids=lambda c: c.name)
def test_log_probs(ranks: Ranks, family: str, case: Case) -> None:
    if ARCHITECTURES[family].moe and case.tp > 1:
        case = replace(case, sequence_parallel=True, etp=1 if ARCHITECTURES[family].whole_experts else None)
    wanted = _hf_log_probs(family)
    assert wanted.std() > 0.5
    for got in ranks.run(case.world, _megatron_log_probs, case, family):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def _hf_gradients(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Of the mean cross-entropy, by the names in Hugging Face's files: saved as if they were the weights."""
    model, batch = deepcopy(hugging_face(family)), _batch()
    for i in range(len(batch)):
        tokens = batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
        logits = model(tokens[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        (loss / batch.response_mask.sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _megatron_gradients(family: str) -> dict[str, torch.Tensor]:
    from megarl.algorithms.cross_entropy import cross_entropy
    from megarl.models.fill import local_view

    arch, batch = ARCHITECTURES[family], _batch()
    with actor_in(Case(), arch) as actor:
        actor.load(source_of(random_weights(arch, 1)))
        weights = torch.full((len(batch.tokens),), 1.0 / int(batch.response_mask.sum()))
        actor.accumulate_gradients(batch, actor.plan(batch, len(batch)), weights, cross_entropy)
        gradients = {name: p.main_grad for name, p in actor.parameters().items() if hasattr(p, "main_grad")}
        tensors = logical_tensors(arch)
        whole: dict[str, torch.Tensor] = {}
        for at in actor.side.placements(0):
            if at.param in gradients:
                empty = torch.full(tensors[at.tensor].shape, torch.nan)
                part = whole.setdefault(at.tensor, empty)[tuple(slice(*x) for x in at.box)]
                part.copy_(local_view(gradients[at.param], at))
        return {name: x.permute(tensors[name].order).reshape(tensors[name].hf_shape) for name, x in whole.items()}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gradients(ranks: Ranks, family: str, tmp_path: Path) -> None:
    """Of every weight; a router's bias for the choice has none."""
    wanted, (got,) = _hf_gradients(family, tmp_path), ranks.run(1, _megatron_gradients, family)
    buffers = {name for name, tensor in logical_tensors(ARCHITECTURES[family]).items() if tensor.kind == "buffer"}
    assert got.keys() == wanted.keys() - buffers
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: n + text)
    assert all(gradient.any() for name, gradient in got.items() if ".experts." not in name)  # some get no token

"""The native engine against Hugging Face's models with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hugging_face import hugging_face
from tiny_engines import GREEDY, GROUPS, MIXED, SAMPLED, engine_of
from tiny_families import ARCHITECTURES
from torch import Tensor

from megarl.rollout.native.sampler import sample


@torch.no_grad()
def hf_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """float32 [response, vocab], from which each response token is drawn, by one full forward pass without cache."""
    return model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def hf_logp(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """float32 [response], log-probability of each response token."""
    return hf_logits(model, prompt, response).log_softmax(-1)[range(len(response)), list(response)]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_greedy_equals_hugging_face(family: str) -> None:
    model = hugging_face(family)
    out = engine_of(ARCHITECTURES[family]).generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    for prompt, completion in zip(MIXED, out, strict=True):
        want = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
        assert list(completion.response.ids) == want.tolist()
        torch.testing.assert_close(
            torch.tensor(completion.response.logp), hf_logp(model, prompt, want.tolist()), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_samples_are_drawn_from_hugging_faces_logits(family: str) -> None:
    out = engine_of(ARCHITECTURES[family]).generate(GROUPS, SAMPLED, seeds=range(100, 100 + len(GROUPS)))
    for i, (prompt, completion) in enumerate(zip(GROUPS, out, strict=True)):
        positions = torch.arange(len(completion.response))
        logits = hf_logits(hugging_face(family), prompt, completion.response.ids)
        want = sample(logits, SAMPLED, seeds=torch.full_like(positions, 100 + i), positions=positions)
        assert list(completion.response.ids) == want.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(completion.response.logp), want.logp, atol=1e-5, rtol=0)


def test_bfloat16_is_as_close_to_float32_as_hugging_face_is() -> None:
    arch = ARCHITECTURES["qwen3"]
    unchanged = replace(SAMPLED, temperature=1.0)
    out = engine_of(arch, dtype=torch.bfloat16).generate(GROUPS, unchanged, seeds=range(len(GROUPS)))
    rounded = hugging_face("qwen3", dtype=torch.bfloat16)
    ours, theirs = [], []
    for prompt, completion in zip(GROUPS, out, strict=True):
        exact = hf_logp(hugging_face("qwen3"), prompt, completion.response.ids)
        ours.append(torch.tensor(completion.response.logp) - exact)
        theirs.append(hf_logp(rounded, prompt, completion.response.ids) - exact)
    assert torch.cat(ours).abs().mean() < 1.3 * torch.cat(theirs).abs().mean()

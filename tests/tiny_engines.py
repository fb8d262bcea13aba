"""Tiny models and requests for the engine tests. Imports no transformers, which would cost every rank seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_weights import fill_engine, random_weights
from tiny_families import VOCAB

from megarl.models.architecture import Architecture
from megarl.rollout.native.engine import NativeEngine
from megarl.types import Completion, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=14, stop_token_ids=(3, 7, 11, 20))


def text_of(token_ids: Sequence[int]) -> str:
    """A made-up tokenizer's text: token 7 is "<7>"."""
    return "".join(f"<{i}>" for i in token_ids)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


MIXED = prompts_of([5, 1, 17, 2, 30, 9])
GROUPS = [p for p in prompts_of([6, 1, 13, 4, 9]) for _ in range(5)]
"""Five samples of each prompt."""


def engine_of(arch: Architecture, group: dist.ProcessGroup | None = None, **settings: Any) -> NativeEngine:
    """An awake engine with `random_weights`."""
    usual: dict[str, Any] = {
        "dtype": torch.float32,
        "device": "cpu",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "max_model_len": 44,
        "decode": text_of,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": False,
    }
    engine = NativeEngine(arch, tp_group=group, **(usual | settings))
    tp, r = (1, 0) if group is None else (group.size(), group.rank())
    ep = tp if settings.get("enable_expert_parallel") else 1
    fill_engine(engine.parameters(), arch, random_weights(arch, seed=1), tp, r, ep)
    engine.wake()
    return engine


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [tuple(c.response.ids) for c in completions]


def assert_same(got: Sequence[Completion], want: Sequence[Completion], tolerance: float = 1e-5) -> None:
    """The same tokens, and log-probabilities up to the rounding of differently shaped products."""
    assert tokens_of(got) == tokens_of(want)
    for a, b in zip(got, want, strict=True):
        assert a.finish_reason == b.finish_reason
        assert a.response.logp == pytest.approx(b.response.logp, abs=tolerance)

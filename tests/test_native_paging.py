"""The native engine's KV cache in blocks: who shares, who is cut short when blocks run out, how many there are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from selection import quick
from tiny_engines import GREEDY, GROUPS, assert_same, engine_of, prompts_of, text_of
from tiny_families import ARCHITECTURES

from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.parallel.experts import TensorSplit
from megarl.rollout.engine import Request
from megarl.rollout.native import cache_size, engine
from megarl.rollout.native.blocks import SCRATCH_BLOCK
from megarl.rollout.native.scheduler import Admission, Scheduler
from megarl.rollout.native.slots import Rows
from megarl.types import Completion, SamplingParams


def scheduler_of(prompts: list[list[int]], params: SamplingParams = GREEDY, **limits: int) -> Scheduler:
    usual = {"max_num_seqs": 64, "max_num_batched_tokens": 10_000, "blocks": 999}
    scheduler = Scheduler(decode=text_of, **(usual | limits))
    scheduler.submit([Request(key=i, prompt=prompt, params=params, seed=0) for i, prompt in enumerate(prompts)])
    return scheduler


def draw(scheduler: Scheduler, *tokens: int) -> dict[int, Completion]:
    """Draw a token for each running request that may have another: all the same, or each its own."""
    rows = scheduler.next_rows()
    ids = np.resize(np.array(tokens or [5], dtype=np.int32), len(rows))
    return scheduler.advance(rows, ids, np.zeros(len(rows), dtype=np.float32))


def prompts_computed(admission: Admission) -> list[list[int]]:
    return [r.cached for r in admission.computed]


# ------------------------------------------------------------------------------------------------------------ sharing


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    scheduler = scheduler_of([[1, 2, 3]], replace(GREEDY, max_tokens=13), max_num_seqs=6)
    scheduler.submit([Request(key=i, prompt=[1, 2, 3], params=GREEDY, seed=0) for i in range(1, 8)])
    admission = scheduler.admit()
    assert prompts_computed(admission) == [[1, 2]] and len(admission.entered) == 6
    assert (admission.copies.sources, admission.copies.targets) == ([1] * 5, [2, 3, 4, 5, 6])
    for _ in range(12):
        draw(scheduler)
    assert len(scheduler.running) == 1  # all but the first sequence have finished
    admission = scheduler.admit()  # the two that waited copy from it while it runs
    assert admission.computed == [] and admission.copies.sources == [1, 1]


def test_samples_share_the_full_blocks_of_their_prompt() -> None:
    scheduler = scheduler_of([list(range(40))] * 3, SamplingParams(max_tokens=60))
    admission = scheduler.admit()  # 39 tokens in the cache: two full blocks and 7 tokens
    first, *others = scheduler.running
    assert all(r.blocks[:2] == first.blocks[:2] and r.blocks[2] != first.blocks[2] for r in others)
    assert admission.copies.sources == [first.blocks[2]] * 2
    assert admission.copies.targets == [r.blocks[2] for r in others]
    for _ in range(8):
        draw(scheduler)
    scheduler.admit()
    assert [len(r.blocks) for r in scheduler.running] == [3, 3, 3]  # the newest token takes their last place
    draw(scheduler)
    scheduler.admit()
    assert len({r.blocks[3] for r in scheduler.running}) == 3


def test_a_prompt_that_ends_with_a_block_is_not_copied() -> None:
    scheduler = scheduler_of([list(range(BLOCK_SIZE + 1))] * 2)
    admission = scheduler.admit()
    first, second = scheduler.running
    assert admission.copies.sources == []
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]


def test_prompts_computed_together_respect_the_limit() -> None:
    scheduler = scheduler_of(prompts_of([9, 5, 5, 5, 5, 40, 2]), max_num_batched_tokens=20)
    admitted = []
    while len(scheduler.running) < 7:
        admitted.append([len(p) for p in prompts_computed(scheduler.admit())])
    assert admitted == [[8, 4, 4, 4], [4], [39], [1]]  # one prompt may exceed the limit alone


# --------------------------------------------------------------------------------------------------- out of blocks


def test_the_youngest_is_cut_short_and_enters_again_with_its_response() -> None:
    scheduler = scheduler_of([[1] * 15, [2] * 15, [3] * 15], SamplingParams(max_tokens=20), blocks=5)
    scheduler.admit()
    assert [r.request.key for r in scheduler.running] == [0, 1]  # a third would leave no block to grow
    for token in range(3):
        draw(scheduler, token)
        scheduler.admit()
    assert [len(r.blocks) for r in scheduler.running] == [2, 2] and len(scheduler.under_way()[0]) == 3
    for token in range(3, 17):
        draw(scheduler, token)
        scheduler.admit()
    assert len(scheduler.under_way()[0]) == 17
    draw(scheduler, 17)
    admission = scheduler.admit()  # no block is left, and both want one
    assert [r.request.key for r in scheduler.running] == [0] and admission.entered == []
    while scheduler.running[0].request.key == 0:
        draw(scheduler, 18)
        admission = scheduler.admit()
    assert [r.request.key for r in admission.computed] == [1]
    assert admission.computed[0].cached == [2] * 15 + list(range(17))  # the newest token is still to be decoded
    made: dict[int, Completion] = {}
    while scheduler.busy:
        made |= draw(scheduler)
        scheduler.admit()
    assert {key: len(c.response) for key, c in made.items()} == {1: 20, 2: 20}


@pytest.mark.parametrize(
    ("family", "blocks"),
    quick(
        [
            ("qwen3", 7),
            ("qwen3", 10),
            ("qwen3", 16),
            ("gemma3_text", 10),
            ("gpt_oss", 10),
            ("deepseek_v3_yarn", 10),
            ("qwen3_next", 10),
        ],
        0,
        6,
    ),
)
def test_running_out_of_blocks_does_not_change_completions(
    monkeypatch: pytest.MonkeyPatch, family: str, blocks: int
) -> None:
    arch = ARCHITECTURES[family]
    params = SamplingParams(temperature=0.9, max_tokens=65, stop_token_ids=(3,))
    want = engine_of(arch, max_model_len=80).generate(GROUPS, params, seeds=range(len(GROUPS)))
    recomputed: list[int] = []
    admit = Scheduler.admit

    def spy(self: Scheduler) -> Admission:
        admission = admit(self)
        recomputed.extend(r.request.key for r in admission.computed if r.token_ids)
        return admission

    monkeypatch.setattr(Scheduler, "admit", spy)
    monkeypatch.setattr(engine, "cache_blocks", lambda *_, **__: blocks)
    got = engine_of(arch, max_model_len=80).generate(GROUPS, params, seeds=range(len(GROUPS)))
    assert_same(got, want)
    assert recomputed


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_written_by_two_or_lost(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3)] * rng.randrange(1, 40) for _ in range(12) for _ in range(rng.randrange(1, 5))]
    scheduler = scheduler_of(
        prompts, SamplingParams(max_tokens=40, stop_token_ids=(1,)), blocks=blocks_for(80) + 4, max_num_seqs=8
    )
    made, steps = dict[int, Completion](), StepsAhead(scheduler, lambda: int(rng.random() < 0.03))
    while scheduler.busy:
        made |= steps.step()
    assert len(made) == len(prompts)
    assert scheduler._pool.free == blocks_for(80) + 3 and scheduler._slots.free == 8


class StepsAhead:
    """Begins a step before it tells the scheduler of the one before, as the engine does, and checks who has blocks."""

    def __init__(self, scheduler: Scheduler, token: Callable[[], int]) -> None:
        self._scheduler, self._token = scheduler, token
        self.begun: Rows | None = None

    def step(self) -> dict[int, Completion]:
        rows, self.begun = self.begun or self._begin(), self._begin()
        made = {}
        if rows is not None:
            ids = np.array([self._token() for _ in range(len(rows))], dtype=np.int32)
            made = self._scheduler.advance(rows, ids, np.zeros(len(rows), dtype=np.float32))
        if not self._scheduler.running:
            self.begun = None
        return made

    def _begin(self) -> Rows | None:
        admission, scheduler = self._scheduler.admit(), self._scheduler
        assert scheduler.running
        held = [block for r in scheduler.running for block in r.blocks]
        rows = scheduler.next_rows()
        holders = {r.slot: r for r in scheduler.running}
        assert len(holders) == len(scheduler.running) and SCRATCH_BLOCK not in held
        written = list(admission.copies.targets)
        for _, position, slot, block, *_ in rows.table:
            assert len(holders[slot].blocks) == blocks_for(position + 1) and holders[slot].blocks[-1] == block
            written.append(block)
        assert all(held.count(block) == 1 for block in written)
        assert not set(admission.copies.sources) & set(admission.copies.targets)
        return rows if len(rows) else None


# ------------------------------------------------------------------------------------------------------ size of cache


def _blocks_on_gpu(monkeypatch: pytest.MonkeyPatch, *, free: float, total: float, share: float, **sizes: Any) -> int:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), int(total)))
    return _blocks("cuda", share=share, **sizes)


def _blocks(device: str, *, share: float, **sizes: Any) -> int:
    return cache_size.cache_blocks(
        ARCHITECTURES["qwen2"],
        TensorSplit(),
        tp_group=None,
        dtype=torch.float32,
        device=torch.device(device),
        weight_bytes=10**6,
        gpu_memory_utilization=share,
        **({"max_num_seqs": 10, "max_num_batched_tokens": 100, "max_model_len": 100} | sizes),
    )


def test_a_cache_in_host_memory_grows_with_what_is_in_use() -> None:
    """A step that has five sequences takes no more where there is room for 4,000."""
    arch = ARCHITECTURES["qwen2"]
    prompts = [[i, *range(1, 40), *range(1, 40), *range(1, 40), *range(1, 40)] for i in range(5)]
    params = SamplingParams(max_tokens=140, temperature=1.0)
    engines = [engine_of(arch, max_num_seqs=n, max_model_len=300) for n in (5, 4000)]
    made = [engine.generate(prompts, params, seeds=range(5)) for engine in engines]
    assert made[0] == made[1]
    small, large = (engine._cache for engine in engines)
    assert small is not None and large is not None and large.blocks == 4000 * 19 + 1
    assert max(layer.shape[1] for layer in large.layers) <= 2 * (5 * 19 + 1)


def test_cache_takes_what_it_can_use_or_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    block = 2 * 2 * 2 * BLOCK_SIZE * 8 * 4
    assert _blocks_on_gpu(monkeypatch, free=8e9, total=1e10, share=0.5) == 10 * 7 + 1
    big = {"max_num_seqs": 100_000, "max_num_batched_tokens": 1, "max_model_len": 1600}
    allowed = _blocks_on_gpu(monkeypatch, free=8e9, total=1e10, share=0.5, **big)
    assert 4.7e9 < allowed * block < 5e9 - 10**6
    assert 1.7e9 < _blocks_on_gpu(monkeypatch, free=2e9, total=1e10, share=0.5, **big) * block < 2e9


def test_a_cache_in_host_memory_takes_no_more_than_the_rank_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "cpu_rank_memory", lambda: 10**10)
    block = 2 * 2 * 2 * BLOCK_SIZE * 8 * 4
    sizes = {"max_num_seqs": 100_000, "max_num_batched_tokens": 1, "max_model_len": 1600}
    assert 4.7e9 < _blocks("cpu", share=0.5, **sizes) * block < 5e9 - 10**6


def test_a_cache_too_small_for_one_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"room for \d+ tokens, fewer than .* = 5000: raise rollout.gpu_memory") as e:
        _blocks_on_gpu(monkeypatch, free=8e9, total=1e10, share=0.0002, max_model_len=5000)
    assert "\n" not in str(e.value)

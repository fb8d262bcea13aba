"""The native engine request by request: interrupted, gone on with, kept for another turn, each sampled in its way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from selection import quick
from test_native_paging import StepsAhead, draw
from tiny_engines import GREEDY, GROUPS, MIXED, SAMPLED, assert_same, engine_of, prompts_of, text_of
from tiny_families import ARCHITECTURES

from megarl.models.architecture import Architecture
from megarl.models.sizes import blocks_for
from megarl.rollout.engine import Request
from megarl.rollout.native import engine as native_engine
from megarl.rollout.native.engine import NativeEngine
from megarl.rollout.native.scheduler import Scheduler
from megarl.rollout.native.slots import WINDOW
from megarl.types import Completion, SamplingParams, Tokens

LONG = replace(SAMPLED, max_tokens=30, stop_token_ids=(3,))


def _finish(engine: NativeEngine) -> dict[int, Completion]:
    made: dict[int, Completion] = {}
    while engine.busy:
        made.update(engine.step())
    return made


def _requests(prompts: list[list[int]], params: SamplingParams = LONG, **fields: Any) -> list[Request]:
    return [Request(key=i, prompt=p, params=params, seed=i, **fields) for i, p in enumerate(prompts)]


def _going_on(requests: list[Request], made: dict[int, Completion]) -> list[Request]:
    return [replace(r, response=made[r.key].response) for r in requests if r.key in made]


# --------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize(
    "settings", quick([{}, {"max_num_seqs": 7}, {"max_num_seqs": 7, "max_num_batched_tokens": 20}], 2)
)
@pytest.mark.parametrize("after", [1, 5])
def test_an_interrupted_response_goes_on_as_if_it_had_not_been(settings: dict[str, Any], after: int) -> None:
    """Its random numbers are those of its places in the whole response, whichever engine and batch it is in."""
    arch, requests = ARCHITECTURES["qwen3"], _requests(GROUPS)
    want = engine_of(arch).generate(GROUPS, LONG, seeds=range(len(GROUPS)))
    engine, made = engine_of(arch, **settings), dict[int, Completion]()
    engine.submit(requests)
    rounds = 0
    while engine.busy:
        for _ in range(after):
            if engine.busy:
                made.update(engine.step())
        unfinished = dict(engine.interrupt())
        assert not engine.busy and all(c.finish_reason is None for c in unfinished.values())
        engine.submit(_going_on(requests, unfinished)[::-1])
        rounds += 1
    assert rounds > 4
    assert_same([made[i] for i in range(len(GROUPS))], want)


def test_requests_may_come_while_others_run() -> None:
    arch, requests = ARCHITECTURES["llama"], _requests(GROUPS)
    want = engine_of(arch).generate(GROUPS, LONG, seeds=range(len(GROUPS)))
    engine, made = engine_of(arch, max_num_seqs=5), dict[int, Completion]()
    for request in requests[::-1]:
        engine.submit([request])
        made.update(engine.step())
    made.update(_finish(engine))
    assert_same([made[i] for i in range(len(GROUPS))], want)


def test_rules_and_kinds_are_those_of_the_requests_that_are_there() -> None:
    """An agent asks each time for another number of tokens: nothing of that may stay, nor slow the others down."""
    scheduler = Scheduler(max_num_seqs=5, max_num_batched_tokens=64, blocks=100, decode=text_of)
    scheduler.submit([Request(key=0, prompt=(5, 6), params=replace(LONG, max_tokens=1000), seed=0)])
    for i in range(1, 20):
        way = replace(LONG, max_tokens=i, temperature=(t := 0.5 if i == 3 else LONG.temperature))
        scheduler.submit([Request(key=i, prompt=(5, 6), params=way, seed=i)])
        scheduler.admit()
        rows = scheduler.next_rows()
        assert len(scheduler._rules) == 2 and [scheduler.kinds[kind].temperature for kind in rows.kinds] == [0.9, t]
        scheduler.advance(rows, np.array([7, 7], dtype=np.int32), np.zeros(2, dtype=np.float32))
        while len(scheduler.running) == 2:
            scheduler.admit()
            draw(scheduler, 7)
    assert len(scheduler._rules) == 1 and len(scheduler.kinds) == 2


def test_each_request_is_sampled_in_its_own_way() -> None:
    arch = ARCHITECTURES["qwen2"]
    ways = [
        LONG,
        GREEDY,
        replace(SAMPLED, top_k=5),
        replace(LONG, temperature=0.5, max_tokens=3),
        replace(LONG, stop=("<7>",)),
    ]
    engine = engine_of(arch)
    requests = [replace(r, params=ways[r.key % 5]) for r in _requests(GROUPS)]
    engine.submit(requests)
    made = _finish(engine)
    for i, way in enumerate(ways):
        alone = engine_of(arch)
        alone.submit(requests[i::5])
        for key, want in _finish(alone).items():
            assert_same([made[key]], [want])
            assert len(want.response) <= way.max_tokens
    assert len({made[i].finish_reason for i in made}) == 2


def _alone(arch: Architecture, request: Request) -> Tokens:
    """The request's response by an engine of its own, taken from the slot after each step."""
    engine, made = engine_of(arch, max_model_len=600), dict[int, Completion]()
    engine.submit([request])
    while engine.busy:
        made |= engine.step()
        engine.under_way()
    return made[request.key].response


@pytest.mark.parametrize("stops", quick(["length", "token", "string"], 1))
def test_responses_longer_than_what_a_slot_holds_are_those_of_each_request_alone(stops: str) -> None:
    """They end where a slot is full, a token before and after, and later, while the next step is under way."""
    arch = replace(ARCHITECTURES["qwen3"], vocab_size=997)  # of which some come late for the first time
    requests, want = list[Request](), list[Completion]()
    for request, end in zip(_requests(MIXED[:5]), (255, 256, 257, 512, 530), strict=True):
        free = replace(SAMPLED, max_tokens=end + 40, stop_token_ids=())
        response = _alone(arch, replace(request, params=free))
        ids, params = list(response.ids), replace(free, max_tokens=end)
        if stops == "token":
            end = next(n for n in range(end, len(ids)) if ids[n - 1] not in ids[: n - 1])
            params = replace(free, stop_token_ids=(ids[end - 1],))
        elif stops == "string":
            params = replace(free, stop=(text_of(ids[end - 3 : end]),))
        requests.append(replace(request, params=params))
        reason = "length" if stops == "length" else "stop"
        want.append(Completion(response=Tokens().drawn(ids[:end], response.logp[:end]), finish_reason=reason))
    engine, made, steps_ahead = engine_of(arch, max_model_len=600, max_num_seqs=3), dict[int, Completion](), 0
    engine.submit(requests)
    while engine.busy:
        made |= engine.step()
        steps_ahead += engine._in_flight is not None
    assert steps_ahead > 2 * WINDOW == 512
    assert_same([made[i] for i in range(len(requests))], want)


def test_a_response_that_is_long_enough_is_refused() -> None:
    engine = engine_of(ARCHITECTURES["llama"])
    begun = Tokens().observed([1] * 30)
    with pytest.raises(ValueError, match="prompt 1 has a response of 30 tokens already, of 30 at most"):
        engine.submit([*_requests(MIXED[:1]), Request(key=9, prompt=[1], params=LONG, seed=0, response=begun)])
    assert not engine.busy


# -------------------------------------------------------------------------------------------------------------- turns


def _turns(engine: NativeEngine, prompts: list[list[int]], *, keep: bool, turns: int = 3) -> Iterator[list[Completion]]:
    """After each turn somebody says eight tokens more; the turns may be any length."""
    said = prompts_of([8] * len(prompts))
    requests = _requests(prompts, replace(LONG, max_tokens=9), keep=keep)
    engine.submit(requests)
    for turn in range(turns):
        made = _finish(engine)
        yield [made[i] for i in range(len(prompts))]
        params = replace(LONG, max_tokens=9 + 17 * (turn + 1))
        requests = [replace(r, params=params, response=made[r.key].response.observed(said[r.key])) for r in requests]
        engine.submit(requests)
    engine.interrupt()


@pytest.mark.parametrize("family", quick(ARCHITECTURES, *range(0, len(ARCHITECTURES), 3)))
def test_a_turn_in_a_kept_cache_equals_one_that_is_computed_anew(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, computed = ARCHITECTURES[family], list[int]()
    prefill = NativeEngine._prefill

    def spy(self: NativeEngine, cache: Any, admission: Any) -> None:
        computed.append(sum(r.position for r in admission.computed))
        prefill(self, cache, admission)

    monkeypatch.setattr(NativeEngine, "_prefill", spy)
    for settings in ({}, {"max_num_seqs": 4}):  # with 4, what somebody said is computed in parts
        anew = list(_turns(engine_of(arch, max_model_len=90, **settings), MIXED, keep=False))
        assert sum(computed) > 200
        computed.clear()
        kept = list(_turns(engine_of(arch, max_model_len=90, **settings), MIXED, keep=True))
        if not arch.recurrent:  # of which nothing is kept
            assert sum(computed) == sum(len(p) - 1 for p in MIXED)  # the prompts, once
        computed.clear()
        for got, want in zip(kept, anew, strict=True):
            assert_same(got, want)


@pytest.mark.parametrize("blocks", [8, 11, 16])
def test_what_is_kept_gives_way_where_blocks_run_out(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    arch = ARCHITECTURES["qwen3"]
    want = list(_turns(engine_of(arch, max_model_len=90), MIXED, keep=False))
    monkeypatch.setattr(native_engine, "cache_blocks", lambda *_, **__: blocks)
    for got, wanted in zip(_turns(engine_of(arch, max_model_len=90), MIXED, keep=True), want, strict=True):
        assert_same(got, wanted)


def test_another_response_under_the_same_key_shares_nothing() -> None:
    arch = ARCHITECTURES["llama"]
    engine = engine_of(arch, max_model_len=90)
    engine.submit(_requests(MIXED, replace(LONG, max_tokens=9), keep=True))
    made = _finish(engine)
    other = [replace(r, response=Tokens().observed([5, 6, 7, 8])) for r in _requests(MIXED)]
    fresh = engine_of(arch, max_model_len=90)
    for e in (engine, fresh):
        e.submit(other)
    got, want = _finish(engine), _finish(fresh)
    assert_same([got[i] for i in sorted(got)], [want[i] for i in sorted(want)])
    assert all(list(made[i].response.ids[:4]) != [5, 6, 7, 8] for i in made)


def _turns_on_rank(keep: bool) -> list[list[Completion]]:
    return list(_turns(engine_of(ARCHITECTURES["qwen3"], dist.group.WORLD, max_model_len=90), MIXED, keep=keep))


def test_tensor_parallel_ranks_keep_alike(ranks: Ranks) -> None:
    first, second = ranks.run(2, _turns_on_rank, True)
    assert first == second
    for got, want in zip(first, ranks.run(2, _turns_on_rank, False)[0], strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("seed", range(6))
def test_no_block_is_lost_over_turns_interruptions_and_evictions(seed: int) -> None:
    rng = random.Random(seed)
    blocks = blocks_for(120) + rng.randrange(1, 12)
    scheduler = Scheduler(max_num_seqs=5, max_num_batched_tokens=64, blocks=blocks + 1, decode=text_of)
    params = [SamplingParams(max_tokens=most, stop_token_ids=(1,)) for most in (20, 60, 90)]
    prompts = [[rng.randrange(3)] * rng.randrange(1, 30) for _ in range(6)]
    requests = {
        i: Request(key=i, prompt=prompts[i % 6], params=params[0], seed=i, keep=rng.random() < 0.6) for i in range(30)
    }
    scheduler.submit(list(requests.values()))
    finished, steps = 0, StepsAhead(scheduler, lambda: int(rng.random() < 0.05))
    for _ in range(2000):
        if not scheduler.busy:
            break
        made = steps.step()
        if rng.random() < 0.03:
            made |= scheduler.interrupt()
            assert not scheduler.busy
            steps.begun = None
        again = []
        for key, completion in made.items():
            request = requests[key]
            turn = params.index(request.params)
            response = completion.response
            if completion.finish_reason is not None:
                if turn == 2 or rng.random() < 0.2:
                    scheduler.forget([key])
                    finished += 1
                    continue
                response, turn = response.observed([2, 0]), turn + 1
            requests[key] = replace(request, response=response, params=params[turn])
            again.append(requests[key])
        scheduler.submit(again)
    assert finished == 30 and not scheduler.busy
    assert scheduler._pool.free == blocks and scheduler._slots.free == 5 and not scheduler._kept


def test_waking_forgets_what_is_kept() -> None:
    """With weights that have changed in place, where the cache is not given back."""
    engine = engine_of(ARCHITECTURES["qwen2"], max_model_len=90)
    requests = _requests(MIXED, replace(LONG, max_tokens=9), keep=True)
    engine.submit(requests)
    made = _finish(engine)
    for p in engine.parameters().values():
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    engine.wake()
    going_on = [replace(r, params=LONG) for r in _going_on(requests, made)]
    engine.submit(going_on)
    got = _finish(engine)
    engine.wake()
    engine.submit(going_on)
    assert got == _finish(engine)

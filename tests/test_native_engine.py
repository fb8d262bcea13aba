"""The native engine across tensor-parallel sizes and batchings, its finishing rules, its sleep and wake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_weights import fill_engine, random_weights
from ranks import Ranks
from selection import quick
from tiny_engines import GREEDY, GROUPS, MIXED, SAMPLED, assert_same, engine_of, prompts_of, text_of, tokens_of
from tiny_families import ARCHITECTURES

from megarl.models.architecture import Architecture
from megarl.models.weights import engine_placements
from megarl.parallel.experts import TensorSplit
from megarl.rollout.native.graphs import bucket
from megarl.rollout.native.model import Decoder, parameter_shapes
from megarl.types import Completion, SamplingParams

# ---------------------------------------------------------------------------------------------- tensor parallel


def _generate_on_rank(
    arch: Architecture, prompts: list[list[int]], params: SamplingParams, settings: dict[str, Any]
) -> list[Completion]:
    assert dist.group.WORLD is not None
    return engine_of(arch, dist.group.WORLD, **settings).generate(prompts, params, seeds=range(len(prompts)))


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        *quick([(family, 2) for family in ARCHITECTURES], *range(0, len(ARCHITECTURES), 3)),
        *quick([("qwen2", 4), ("qwen3", 4), ("mixtral", 4)]),
    ],
)  # with 4 ranks, each of the 2 KV heads is on two of them
def test_tensor_parallel_equals_one_rank(ranks: Ranks, family: str, tp: int) -> None:
    arch = ARCHITECTURES[family]
    for prompts, params in ((MIXED, GREEDY), (GROUPS, SAMPLED)):
        want = engine_of(arch).generate(prompts, params, seeds=range(len(prompts)))
        got = ranks.run(tp, _generate_on_rank, arch, prompts, params, {"max_num_seqs": 7})
        assert all(x == got[0] for x in got)  # bit for bit
        assert_same(got[0], want)


def test_bfloat16_ranks_agree_bit_for_bit(ranks: Ranks) -> None:
    settings = {"dtype": torch.bfloat16, "max_num_seqs": 7}
    first, second = ranks.run(2, _generate_on_rank, ARCHITECTURES["qwen3"], GROUPS, SAMPLED, settings)
    assert first == second


@pytest.mark.slow
def test_rank_with_nothing_but_vocabulary_padding(ranks: Ranks) -> None:
    arch = replace(ARCHITECTURES["qwen2"], vocab_size=5)
    prompts = [[0, 1, 4], [3, 2]]
    want = engine_of(arch).generate(prompts, GREEDY, seeds=[0, 0])
    assert_same(ranks.run(4, _generate_on_rank, arch, prompts, GREEDY, {})[0], want)


@pytest.mark.parametrize(
    ("family", "tp"),
    [("qwen3_moe", 2), *quick([("mixtral", 4), ("glm4_moe", 2), ("gpt_oss", 2), ("deepseek_v3", 4)], 2)],
)
def test_whole_experts_equal_shares_of_every_expert(ranks: Ranks, family: str, tp: int) -> None:
    """Attention and shared experts stay split."""
    arch = ARCHITECTURES[family]
    for prompts, params in ((MIXED, GREEDY), (GROUPS, SAMPLED)):
        want = engine_of(arch).generate(prompts, params, seeds=range(len(prompts)))
        settings = {"max_num_seqs": 7, "enable_expert_parallel": True}
        got = ranks.run(tp, _generate_on_rank, arch, prompts, params, settings)
        assert all(x == got[0] for x in got)  # bit for bit
        assert_same(got[0], want)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ValueError, match="size = 4 does not divide the model's 6 experts, of which each rank has whole"
    ):
        ARCHITECTURES["qwen3_moe"].check_generation(TensorSplit(tp=4, ep=4))
    with pytest.raises(ValueError, match="enable_expert_parallel: the model has no experts"):
        ARCHITECTURES["qwen3"].check_generation(TensorSplit(tp=2, ep=2))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_placements_cover_the_parameters(family: str, tp: int) -> None:
    arch = ARCHITECTURES[family]
    full = random_weights(arch, seed=1)
    whole = arch.moe is not None and arch.moe.num_experts % tp == 0 and tp > 1
    for r, ep in ((r, ep) for r in range(tp) for ep in ((1, tp) if whole else (1,))):
        split = TensorSplit(tp=tp, ep=ep)
        params = {name: torch.empty(shape) for name, shape in parameter_shapes(arch, split).items()}
        assert set(params) == {p.param for p in engine_placements(arch, split, r)}
        fill_engine(params, arch, full, tp, r, ep)
        padding = arch.padded_vocab_size(tp) - arch.vocab_size if r == tp - 1 else 0
        for name, p in params.items():
            rows = len(p) - (padding if name in ("model.embed_tokens.weight", "lm_head.weight") else 0)
            assert not p[:rows].isnan().any() and p[rows:].isnan().all()


# ------------------------------------------------------------------------------------------ continuous batching


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"max_num_seqs": 8, "max_num_batched_tokens": 10},
        {"max_num_batched_tokens": 1},
    ],
)
def test_batching_does_not_change_completions(limits: dict[str, Any]) -> None:
    arch = ARCHITECTURES["qwen3"]
    want = engine_of(arch).generate(GROUPS, SAMPLED, seeds=range(len(GROUPS)))
    assert len({len(c.response) for c in want}) > 5  # sequences do leave at different times
    assert len(set(tokens_of(want))) > 20  # and the samples of a prompt differ
    assert_same(engine_of(arch, **limits).generate(GROUPS, SAMPLED, seeds=range(len(GROUPS))), want)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_long_prompt_is_computed_in_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens, their log-probs and their experts are those of a prompt that is computed whole."""
    arch, passes = ARCHITECTURES[family], list[int]()
    original = Decoder.forward

    def forward(self: Decoder, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        passes.append(len(tokens))
        return original(self, tokens, *args)

    params = replace(SAMPLED, routed_experts=arch.moe is not None)
    settings = {"max_num_seqs": 4, "records_routing": params.routed_experts}
    want = engine_of(arch, **settings).generate(MIXED, params, seeds=range(len(MIXED)))
    monkeypatch.setattr(Decoder, "forward", forward)
    got = engine_of(arch, max_num_batched_tokens=7, **settings).generate(MIXED, params, seeds=range(len(MIXED)))
    assert_same(got, want)
    assert (max(passes) == 7) == (arch.prompt_keys(1) is not None)
    assert [c.response.routed for c in got] == [c.response.routed for c in want]


def test_order_does_not_change_completions() -> None:
    arch = ARCHITECTURES["llama"]
    want = engine_of(arch).generate(GROUPS, SAMPLED, seeds=range(len(GROUPS)))
    order = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(2)).tolist()
    got = engine_of(arch, max_num_seqs=4).generate([GROUPS[i] for i in order], SAMPLED, seeds=order)
    assert_same(got, [want[i] for i in order])


def test_second_call_starts_afresh() -> None:
    engine = engine_of(ARCHITECTURES["qwen2"], max_num_seqs=6)
    first = engine.generate(GROUPS, SAMPLED, seeds=range(len(GROUPS)))
    engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    assert_same(engine.generate(GROUPS, SAMPLED, seeds=range(len(GROUPS))), first)
    assert engine.generate([], SAMPLED, seeds=[]) == []


# --------------------------------------------------------------------------------------------------- finishing


def test_stop_strings() -> None:
    engine = engine_of(ARCHITECTURES["qwen2"])
    free = engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    a, b = free[0].response.ids[3:5]
    stop = (f"{a}><{b}", "never")  # begins within a token, ends within the next
    stopped = engine.generate(MIXED, replace(GREEDY, stop=stop), seeds=[0] * len(MIXED))
    for one, whole in zip(stopped, free, strict=True):
        ends = [n for n in range(1, 13) if stop[0] in text_of(whole.response.ids[:n])]
        assert one.response.ids == whole.response.ids[: ends[0] if ends else 12]
        assert one.response.logp == pytest.approx(whole.response.logp[: len(one.response)], abs=1e-5)
        assert one.finish_reason == ("stop" if ends else "length")
    assert stopped[0].finish_reason == "stop"


def test_stop_tokens_and_max_tokens() -> None:
    engine = engine_of(ARCHITECTURES["qwen2"])
    free = engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    assert all(c.finish_reason == "length" and len(c.response) == 12 for c in free)
    stops = (free[0].response.ids[4], free[4].response.ids[7])
    stopped = engine.generate(MIXED, replace(GREEDY, stop_token_ids=stops), seeds=[0] * len(MIXED))
    reasons = set()
    for a, b in zip(stopped, free, strict=True):
        end = next((i + 1 for i, t in enumerate(b.response.ids) if t in stops), None)
        assert a.response.ids == b.response.ids[:end]
        assert a.finish_reason == ("length" if end is None else "stop")
        assert len(a.response.logp) == len(a.response)
        reasons.add(a.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_token_in_last_place_is_a_stop() -> None:
    engine = engine_of(ARCHITECTURES["qwen2"])
    token = engine.generate([MIXED[0]], replace(GREEDY, max_tokens=1), seeds=[0])[0].response.ids[0]
    out = engine.generate([MIXED[0]], replace(GREEDY, max_tokens=1, stop_token_ids=(token,)), seeds=[0])[0]
    assert (list(out.response.ids), out.finish_reason) == ([token], "stop")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty; give it at least one token"),
        ([1] * 33, "prompt 1 has 33 tokens; with max_tokens = 12 that exceeds max_model_len = 44"),
        ([1, 61], "prompt 1 has token ids outside the model's vocabulary of 61"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(ARCHITECTURES["llama"]).generate([[1], prompt], GREEDY, seeds=[0, 0])


def test_longest_possible_request_is_served() -> None:
    prompt = prompts_of([32])
    out = engine_of(ARCHITECTURES["qwen3"]).generate(prompt, GREEDY, seeds=[0])
    roomy = engine_of(ARCHITECTURES["qwen3"], max_model_len=100).generate(prompt, GREEDY, seeds=[0])
    assert_same(out, roomy)


# ------------------------------------------------------------------------------------------------ sleep and wake


def test_sleep_keeps_tensors_and_values() -> None:
    engine = engine_of(ARCHITECTURES["qwen2"])
    want = engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    before = engine.parameters()
    objects, values = list(before.values()), {k: v.clone() for k, v in before.items()}
    addresses = [p.data_ptr() for p in objects]
    engine.sleep()
    engine.wake()
    assert all(a is b for a, b in zip(engine.parameters().values(), objects, strict=True))
    assert [p.data_ptr() for p in objects] == addresses
    assert all(torch.equal(engine.parameters()[k], v) for k, v in values.items())
    assert engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED)) == want


def test_released_weights_come_back_in_the_same_tensors() -> None:
    arch = ARCHITECTURES["qwen3"]
    engine = engine_of(arch)
    want = engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED))
    held = engine.parameters()
    engine.sleep(release_weights=True)
    assert all(p.untyped_storage().nbytes() == 0 for p in held.values())
    engine.wake(weights_only=True)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in held.values())
    fill_engine(held, arch, random_weights(arch, seed=1), 1, 0)
    engine.wake()
    assert engine.generate(MIXED, GREEDY, seeds=[0] * len(MIXED)) == want


def test_graphs_are_filled_up_by_few_rows() -> None:
    """Rows are not free beyond some tens: no batch is filled up by 64 or more, none to more than twice its rows."""
    filled = {rows: bucket(rows, 1000) for rows in range(1, 1001)}
    assert all(0 <= size - rows < min(rows, 64) for rows, size in filled.items())
    assert max(filled.values()) == 1000 and len(set(filled.values())) == 7 + 15

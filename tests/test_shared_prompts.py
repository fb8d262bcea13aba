"""Prompts that several sequences begin with are computed once: the same log-probabilities, values and gradients."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import FINGERPRINT, metrics_of, write_run
from training_cases import (
    ARCH,
    LATENT,
    LINEAR,
    NORMS_BEHIND,
    SINKS,
    SOME_WITH_EXPERTS,
    WINDOWS,
    Case,
    actor_in,
    fixed_batch,
    train,
)

from megarl.config import load_config
from megarl.data.balance import karmarkar_karp
from megarl.data.packing import SharedPrompts, pack_by_tokens
from megarl.models.architecture import Architecture
from megarl.models.heads import _states
from megarl.models.microbatch import Repeated, SequenceShard, make_micro_batch
from megarl.models.packed_attention import SharedKeys, packed_attention, padded_attention
from megarl.roles.passes import prompts_of
from megarl.trainer.layouts import check_shared_prompts
from megarl.types import Batch, batch_of

CPU = torch.device("cpu")


def _model(shared: bool) -> dict[str, Any]:
    return {"model": {"dtype": "float32", "use_prefix_grouper": shared}}


# ---------------------------------------------------------------------------------------------------------- attention


def _attended(device: str, dtype: torch.dtype, **rule: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients of two sequences with one prompt of 7 tokens, and one by itself; and of each alone."""
    generator = torch.Generator().manual_seed(0)
    prompt, lengths = 7, (12, 10, 9)
    rows = [*range(12), *range(7), *range(12, 15), *range(15, 24)]
    inputs = [torch.randn(24, heads, 16, generator=generator) for heads in (4, 2, 2)]
    q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs)
    queries = [12, lengths[1] - prompt, 9]
    at = [torch.cat([12 * i + torch.arange(n) for i, n in enumerate(some)]).to(device) for some in (queries, lengths)]
    begins = [torch.tensor(some, dtype=torch.int32, device=device) for some in ([0, 12, 15, 24], [0, 12, 22, 31])]
    shared = SharedKeys(rows=torch.tensor(rows, device=device), cu_seqlens=begins[1], longest=12, slots=at[1])
    got = packed_attention(q, k, v, cu_seqlens=begins[0], longest=12, slots=at[0], shared=shared, **rule)
    want, begin = torch.zeros_like(got), 0
    for length, own in zip(lengths, queries, strict=True):
        mine = torch.tensor(rows[begin : begin + length], device=device)
        alone = padded_attention(*(x[mine][None] for x in (q, k, v)), **rule)[0]
        want = want.index_add(0, mine[-own:], alone[-own:])
        begin += length
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True) for out in (got, want)]
    return [got, *grads[0]], [want, *grads[1]]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_keys_in_common_are_attended_to_as_own_ones(window: int | None, sinks: bool) -> None:
    logits = torch.randn(4, generator=torch.Generator().manual_seed(1)) if sinks else None
    for got, want in zip(*_attended("cpu", torch.float32, window=window, sinks=logits), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float32, 1e-4)], ids=str)
def test_attention_on_gpus_sees_keys_in_common(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    for got, want in zip(*_attended("cuda", dtype, window=window), strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0.02)


# ------------------------------------------------------------------------------------------------------- micro-batches


def _turns() -> Batch:
    """Responses of several turns, in which an environment speaks, to prompts that some have in common."""
    rng = random.Random(4)
    prompts = [[rng.randrange(90) for _ in range(n)] for n in (5, 3, 5)]
    prompts.append(prompts[0][:3])  # begins as another one
    order = [0, 0, 1, 1, 1, 2, 3, 0]
    responses = [[rng.randrange(90) for _ in range(rng.randrange(2, 9))] for _ in order]
    batch = batch_of([prompts[i] for i in order], responses, order)
    mask = batch.response_mask.clone()
    for start, length, prompt in zip(batch.starts, batch.lengths, (len(prompts[i]) for i in order), strict=True):
        if length > prompt + 3:
            mask[start + prompt + 1 : start + prompt + 3] = False
    return batch.with_(response_mask=mask)


def test_a_row_has_a_prompt_once_and_predicts_the_same_tokens() -> None:
    batch = _turns()
    columns = {"number": torch.arange(len(batch.tokens)).float()}
    how: dict[str, Any] = dict(packed=True, shard=SequenceShard(tp=4), device=CPU, columns=columns)
    apart = make_micro_batch(batch, range(8), **how)
    shared = make_micro_batch(batch, range(8), share_prompts=True, **how)
    saved = 5 + 2 * 3  # the second sequence's, and those of two more with the second prompt
    assert (shared.cells >= 0).sum() == (apart.cells >= 0).sum() - saved
    assert shared.packed is not None and shared.packed.shared is not None and shared.tokens.shape[1] % 4 == 0
    for name in ("labels", "index", "sequences", "trained"):
        assert torch.equal(getattr(shared, name), getattr(apart, name))
    assert torch.equal(shared.columns["number"], apart.columns["number"])
    for what in ("tokens", "position_ids"):  # of the tokens that predict, and of the last ones
        for places in ("predictors", "last"):
            one, other = (getattr(micro, what).flatten()[getattr(micro, places)] for micro in (shared, apart))
            assert torch.equal(one, other)
    rows, begin = shared.packed.shared.rows, 0
    for start, length in zip(batch.starts, batch.lengths, strict=True):  # the keys are the whole sequences
        assert torch.equal(shared.tokens[0, rows[begin : begin + length]], batch.tokens[start : start + length])
        assert torch.equal(shared.position_ids[0, rows[begin : begin + length]], torch.arange(length))
        begin += length


def test_what_ends_a_prompt_gets_the_gradient_of_all_that_follow() -> None:
    """Of 64 responses, added up without a rounding after each."""
    positions = torch.tensor([3, 3, 4, 5, 3, 7] + [9] * 64)
    hidden = torch.randn(12, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    grad = torch.randn(len(positions), 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    states = _states(hidden, positions, Repeated.among(positions, CPU))
    assert torch.equal(states, hidden.flatten(0, 1)[positions])
    (got,) = torch.autograd.grad(states, hidden, grad)
    want = torch.zeros(12, 8, dtype=torch.float64).index_add_(0, positions, grad.double()).bfloat16()
    assert torch.equal(got[:, 0], want) and Repeated.among(torch.arange(5), CPU) is None


def test_prompts_with_other_experts_recorded_are_others() -> None:
    batch = _turns()
    experts = torch.zeros(len(batch.tokens), 2, 2, dtype=torch.uint8)
    recorded = batch.with_(routed_experts=experts, routed=torch.ones(len(batch.tokens), dtype=torch.bool))
    how: dict[str, Any] = dict(packed=True, shard=SequenceShard(), device=CPU, share_prompts=True)
    same = make_micro_batch(recorded, range(8), **how)
    experts[batch.starts[1] + 2, 1, 0] = 3  # of the second sequence, whose prompt is the first one's
    other = make_micro_batch(recorded, range(8), **how)
    assert other.tokens.shape[1] == same.tokens.shape[1] + 5
    numbers = prompts_of(recorded).numbers
    assert numbers[0] != numbers[1] and numbers[2] == numbers[3] == numbers[4]


def test_a_first_token_that_is_trained_is_refused() -> None:
    batch = _turns()
    batch = batch.with_(response_mask=torch.ones_like(batch.response_mask))
    with pytest.raises(ValueError, match=r"a sequence.s first token is to be trained, but no token precedes it"):
        make_micro_batch(batch, range(8), packed=True, shard=SequenceShard(), device=CPU)


@pytest.mark.parametrize("seed", range(5))
def test_sequences_with_a_prompt_go_together_within_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    dp, most = rng.choice((1, 2, 4)), 4000
    prompts = [rng.randrange(1, 600) for _ in range(48)]
    of = [i for i in range(48) for _ in range(rng.choice((1, 4, 8)))]
    lengths = [prompts[i] + rng.randrange(1, 500) for i in of]
    shared = SharedPrompts(numbers=of, tokens=[prompts[i] for i in of])
    half = len(of) // 2
    mini_batches = [range(half), range(half, len(of))]
    plan = pack_by_tokens(lengths, mini_batches, dp=dp, max_tokens=most, prompts=shared)
    for number, sequences in enumerate(mini_batches):
        micro_batches = [micro for rank in plan for micro in rank[number]]
        assert sorted(i for micro in micro_batches for i in micro) == list(sequences)
        assert max(shared.computed(micro, lengths) for micro in micro_batches) <= most
        loads = [sum(shared.computed(micro, lengths) for micro in rank[number]) for rank in plan]
        assert max(loads) <= 1.1 * min(loads)
    saved = sum(shared.saved(micro)[0] for rank in plan for mini_batch in rank for micro in mini_batch)
    again = sum(prompts[i] for i, before in zip(of[1:], of, strict=False) if i == before)
    assert 0.9 * again < saved <= again


@pytest.mark.parametrize("prompts_per_rank", [1, 2, 3, 8])
@pytest.mark.parametrize(("prompt", "response"), [(2048, 512), (512, 512), (512, 2048)])
def test_few_prompts_on_a_rank_are_kept_together_where_that_pays(
    prompts_per_rank: int, prompt: int, response: int
) -> None:
    """The fullest rank has never more to compute than with prompts apart, nor much more than with whole ones."""
    rng, dp, n = random.Random(prompts_per_rank), 8, 8
    of = [i for i in range(dp * prompts_per_rank) for _ in range(n)]
    lengths = [prompt + rng.randrange(response // 2, response) for _ in of]
    shared = SharedPrompts(numbers=of, tokens=[prompt] * len(of))
    how: dict[str, Any] = dict(dp=dp, max_tokens=16_384)

    def fullest(plan: list[list[list[list[int]]]], computed: Any) -> int:
        return max(sum(computed(micro) for micro in rank[0]) for rank in plan)

    apart = fullest(pack_by_tokens(lengths, [range(len(of))], **how), lambda micro: sum(lengths[i] for i in micro))
    plan = pack_by_tokens(lengths, [range(len(of))], **how, prompts=shared)
    together = fullest(plan, lambda micro: shared.computed(micro, lengths))
    groups = [range(k, k + n) for k in range(0, len(of), n)]
    whole = [shared.computed(group, lengths) for group in groups]
    dealt_out = max(sum(whole[i] for i in share) for share in karmarkar_karp(whole, range(len(whole)), dp))
    assert together <= apart and together <= dealt_out + dealt_out // 16_384 * prompt  # micro-batches cut groups


@pytest.mark.parametrize(("most", "micro_batches", "again"), [(8192, 77, 51), (16_384, 43, 0), (32_768, 19, 0)])
def test_groups_that_leave_micro_batches_half_empty_are_cut(most: int, micro_batches: int, again: int) -> None:
    """Of 128 prompts of 512 tokens with 8 responses of 512, one fits into 8,192 tokens whole, and two nearly."""
    of = [i for i in range(128) for _ in range(8)]
    lengths, shared = [1024] * len(of), SharedPrompts(numbers=of, tokens=[512] * len(of))
    ((plan,),) = pack_by_tokens(lengths, [range(len(of))], dp=1, max_tokens=most, prompts=shared)
    computed = [shared.computed(micro, lengths) for micro in plan]
    assert len(plan) == micro_batches and max(computed) <= most
    assert sum(computed) == 128 * (512 + 8 * 512) + again * 512


# ------------------------------------------------------------------------------------------------------------ training

LAYOUTS: list[tuple[dict[str, Any], Architecture]] = [
    (dict(tp=2, sequence_parallel=True), ARCH),
    (dict(pp=2, dp=2, chunks=2), ARCH),
    (dict(cp=2, dp=2), ARCH),
    (dict(dp=2), WINDOWS),
    (dict(pp=2, dp=2), SINKS),
    (dict(pp=2), LATENT),
    (dict(dp=2, ep=2), SOME_WITH_EXPERTS),
    (dict(cp=2, tp=2, sequence_parallel=True), NORMS_BEHIND),
    (dict(cp=2, gathers=True, dp=2), WINDOWS),
]


@pytest.mark.parametrize(("layout", "arch"), quick(LAYOUTS, 2), ids=str)
def test_losses_and_gradients_are_the_same(ranks: Ranks, layout: dict[str, Any], arch: Architecture) -> None:
    for mode in ("policy", "supervised"):
        apart, shared = (
            ranks.run(case.world, train, case, 3, mode, arch)[0]
            for case in (Case(**layout, config=_model(share)) for share in (False, True))
        )
        for one, other in zip(apart, shared, strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


def _outputs(shared: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int] | None, float]:
    """Log-probabilities, values, what is saved, and how far the first ratio is from 1."""
    case = Case(dp=2, config=_model(shared))
    with actor_in(case) as actor:
        batch = fixed_batch().with_(temperature=0.9)
        plan = actor.plan(batch)
        logp = actor.log_probs(batch, plan)
        old = batch.with_(old_logp=logp, advantages=batch.response_mask.float())
        from megarl.algorithms.losses.vanilla import PolicyClip

        metrics = actor.update(old, plan.mini_batches[0], PolicyClip(clip_low=0.2, clip_high=0.2))
    with actor_in(case, role="Critic") as critic:
        values = critic.values(batch, critic.plan(batch))
    return logp, values, plan.saved, float(metrics["ratio_max_deviation"].value)


def test_one_plan_for_outputs_and_training(ranks: Ranks) -> None:
    (apart, values, none, _), *_ = ranks.run(2, _outputs, False)
    (shared, values_shared, saved, deviation), *_ = ranks.run(2, _outputs, True)
    torch.testing.assert_close(shared, apart, atol=2e-6, rtol=0)
    torch.testing.assert_close(values_shared, values, atol=2e-6, rtol=0)
    assert none is None and saved[0] > 0 and deviation == 0.0


def _rows(ranks: Ranks, folder: Path, shared: bool) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "reward.py").write_text(FINGERPRINT)
    config = write_run(
        folder,
        reward__name=f"{folder / 'reward.py'}:score",
        trainer__logger=["jsonl"],
        trainer__val_before_train=False,
        trainer__test_freq=0,
        trainer__total_training_steps=2,
        algorithm__adv_estimator="gae",
        actor_rollout_ref__model__use_prefix_grouper=shared,
    )
    ended, said = ranks.run(2, run_here, str(config))[0]
    assert ended == "", said
    return metrics_of(folder)


@pytest.mark.slow
def test_a_run_is_the_same_and_says_what_it_saved(ranks: Ranks, tmp_path: Path) -> None:
    apart, shared = (_rows(ranks, tmp_path / str(share), share)[0] for share in (False, True))
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "rollout/logp_gap_mean"):
        assert 0 != shared[name] == pytest.approx(apart[name], rel=1e-4, abs=1e-6)
    assert 0 < shared["perf/shared_prompt_tokens"] < 0.75 and "perf/shared_prompt_tokens" not in apart
    assert shared["actor/first_ratio_max_deviation"] == 0 and shared["reward/mean"] == apart["reward/mean"]


# -------------------------------------------------------------------------------------------------------------- checks


def test_what_shares_no_prompt_is_refused(tmp_path: Path) -> None:
    config = load_config(str(write_run(tmp_path, actor_rollout_ref__model__use_prefix_grouper=True)))
    model, megatron = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    check_shared_prompts("actor", model, megatron, ARCH)
    with pytest.raises(ValueError, match=r"padded sequences share no prompt; set model\.use_remove_padding=true"):
        check_shared_prompts("actor", model.model_copy(update={"use_remove_padding": False}), megatron, ARCH)
    with pytest.raises(ValueError, match="linear attention in the actor goes on with one sequence alone"):
        check_shared_prompts("actor", model, megatron, LINEAR)
    with pytest.raises(ValueError, match="of the critic count the tokens of each sequence"):
        losses = megatron.model_copy(update={"moe_z_loss_coeff": 0.1})
        check_shared_prompts("critic", model, losses, SOME_WITH_EXPERTS)

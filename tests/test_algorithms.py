"""Advantages, aggregation, KL estimators and the policy loss against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training_cases import policy_loss

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import LossAggMode, token_weights
from megarl.algorithms.cross_entropy import cross_entropy
from megarl.algorithms.estimators.grpo import group_advantages
from megarl.algorithms.kl import AdaptiveKlController, KlPenalty, kl_estimate
from megarl.algorithms.loss import LossInput, LossOutput, columns_for
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch, batch_of


def _batch() -> Batch:
    return batch_of([[1, 2], [1, 2], [3], [3]], [[4], [5, 6, 7], [8, 9], [4, 4, 4, 4]], [0, 0, 1, 1])


def test_batch_lays_sequences_one_after_another() -> None:
    batch = _batch()
    assert batch.tokens.tolist() == [1, 2, 4, 1, 2, 5, 6, 7, 3, 8, 9, 3, 4, 4, 4, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 11, 16]
    assert batch.response_lengths.tolist() == [1, 3, 2, 4]
    assert batch.sum_per_sequence(batch.tokens).tolist() == [7, 21, 20, 19]


def test_own_columns_are_sorted_by_their_length() -> None:
    batch = _batch()
    of_sequence, of_token = torch.arange(4.0), torch.arange(16.0)
    own = batch.with_columns(rarity=of_sequence, surprise=of_token).with_(old_logp=-of_token)
    assert own.column("rarity") is of_sequence and own.column("surprise") is of_token and own.column("values") is None
    assert set(own.sequence_columns) == {"rarity"} and set(own.token_columns) == {"surprise"}

    def loss(x: LossInput) -> LossOutput:
        raise AssertionError

    loss.columns = ("rarity", "surprise", "old_logp", "values")  # type: ignore[attr-defined]
    tokens, sequences = columns_for(loss, own, "token")
    assert set(tokens) == {"rarity", "surprise", "old_logp"} and not sequences
    assert tokens["rarity"].tolist() == [0] * 3 + [1] * 5 + [2] * 3 + [3] * 5
    tokens, sequences = columns_for(loss, own, "sequence")
    assert set(tokens) == {"surprise", "old_logp"} and sequences["rarity"] is of_sequence
    with pytest.raises(ValueError, match="no column 'rarity'"):
        columns_for(loss, batch, "token")
    with pytest.raises(ValueError, match="'rewards' is a field of every batch"):
        batch.with_columns(rewards=of_sequence)
    with pytest.raises(ValueError, match=r"one value per sequence, \[4\], or one per token, \[16\]"):
        batch.with_columns(rarity=torch.zeros(5))


def test_what_depends_on_the_mask_alone_is_computed_once() -> None:
    batch = _batch()
    lengths, starts = batch.response_lengths, batch.starts
    later = batch.with_(old_logp=torch.zeros(16))
    assert later.response_lengths is lengths and later.starts is starts
    masked = later.with_(response_mask=batch.response_mask & (batch.sequence_of_token != 1))
    assert masked.response_lengths.tolist() == [1, 0, 2, 4]


def test_group_advantages() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    mean, std = 1 / 3, math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    wanted = [(1 - mean) / std, -mean / std, -mean / std, 0, 0, 0]
    assert group_advantages(scores, groups, by_std=True).tolist() == pytest.approx(wanted, abs=1e-5)
    plain = [2 / 3, -1 / 3, -1 / 3, 0, 0, 0]
    assert group_advantages(scores, groups, by_std=False).tolist() == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("by_std", [True, False])
@settings(deadline=None)
@given(score=st.floats(-(2.0**99), 2.0**99, width=32), n=st.integers(1, 300), others=st.integers(0, 3))
def test_equal_scores_have_advantage_exactly_0(by_std: bool, score: float, n: int, others: int) -> None:
    """Whatever the score and the size of the group, and whatever other groups there are."""
    scores = torch.tensor([score] * n + [float(i) for i in range(others)])
    groups = torch.tensor([0] * n + [1] * others)
    assert not group_advantages(scores, groups, by_std=by_std)[:n].any()


def test_a_sequence_without_trained_tokens_takes_no_part_in_its_group() -> None:
    batch = _batch()
    mask = batch.response_mask & (batch.sequence_of_token != 1)
    batch = batch.with_(response_mask=mask, rewards=torch.tensor([0.25, 77.0, 1.0, 0.0]))
    out = compute_advantages(batch, AlgorithmConfig(norm_adv_by_std_in_grpo=False), 0.0).advantages
    assert out is not None and out.tolist() == [0] * 9 + [0.5, 0.5, 0] + [-0.5] * 4


def test_kl_in_reward_lowers_the_score_of_its_sequence() -> None:
    batch = _batch()
    old = torch.where(batch.response_mask, -1.0, 0.0)
    ref = torch.where(batch.response_mask & (batch.sequence_of_token == 1), -1.5, old)
    batch = batch.with_(old_logp=old, ref_logp=ref, rewards=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    out = compute_advantages(batch, AlgorithmConfig(use_kl_in_reward=True, norm_adv_by_std_in_grpo=False), 0.2)
    assert out.kl_in_reward is not None and out.advantages is not None
    assert out.kl_in_reward.tolist() == pytest.approx([0, 1.5, 0, 0])
    # 0.2 x 1.5 nats off the second score: the pair is 0.15 above and below its mean; prompt tokens have none
    assert out.advantages.tolist() == pytest.approx([0, 0, 0.15, 0, 0, -0.15, -0.15, -0.15] + [0] * 8, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token-mean", lambda sums, lengths: sum(sums) / sum(lengths)),
        ("seq-mean-token-sum", lambda sums, lengths: sum(sums) / len(sums)),
        (
            "seq-mean-token-mean",
            lambda sums, lengths: sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums),
        ),
        ("seq-mean-token-sum-norm", lambda sums, lengths: sum(sums) / len(sums) / 7),
    ],
)
def test_aggregation_modes(mode: LossAggMode, wanted: object) -> None:
    batch = _batch()
    per_token = torch.arange(16.0) * batch.response_mask
    chosen = [0, 1, 3]
    got = (token_weights(batch, chosen, mode, 7) * per_token).sum()
    sums = batch.sum_per_sequence(per_token)[chosen].tolist()
    assert callable(wanted)
    assert float(got) == pytest.approx(wanted(sums, [1, 3, 4]), rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_are_unbiased(kind: KlPenalty) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(9, generator=generator).log_softmax(0) for _ in range(2))
    exact = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(exact, rel=1e-5)


def test_kl_estimators_by_hand() -> None:
    p, q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_estimate(p, q, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(p, q, "abs").tolist() == [0.5, 1.0]
    assert kl_estimate(p, q, "k2").tolist() == [0.125, 0.5]
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1]
    assert kl_estimate(p, q, "k3").tolist() == pytest.approx(k3, rel=1e-6)
    assert torch.isfinite(kl_estimate(torch.tensor([-1e4]), torch.tensor([0.0]), "k3")).all()


def test_adaptive_kl_controller() -> None:
    control = AdaptiveKlController(0.1, target=2.0, horizon=100)
    control.update(2.2, 10)  # 10 % too high
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    control.update(50.0, 10)  # clipped to 20 %
    assert control.coefficient == pytest.approx(0.101 * (1 + 0.2 * 10 / 100))


@pytest.mark.parametrize(("sequences", "factor"), [(200, 0.6), (250, 0.5), (500, 0.5), (501, 0.5), (10_000, 0.5)])
def test_the_kl_coefficient_stays_positive(sequences: int, factor: float) -> None:
    control = AdaptiveKlController(0.1, target=2.0, horizon=100)
    control.update(0.0, sequences)  # far too low
    assert control.coefficient == pytest.approx(0.1 * factor)


def _tokens(old: list[float], new: list[float], adv: list[float]) -> tuple[LossInput, Tensor]:
    logp = torch.tensor(new, requires_grad=True)
    weights = torch.full((len(new),), 1 / len(new))
    return (
        LossInput(
            output=logp,
            entropy=torch.full_like(logp, 0.5),
            weights=weights,
            columns={"old_logp": torch.tensor(old), "advantages": torch.tensor(adv)},
        ),
        logp,
    )


@pytest.mark.parametrize("clip_c", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [25.0, 89.0, 1e4, -89.0, -1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float, clip_c: float | None) -> None:
    tokens, logp = _tokens([-log_ratio, 0.0], [0.0, 0.0], [advantage, 1.0])
    tokens = replace(tokens, columns={**tokens.columns, "ref_logp": torch.tensor([-log_ratio, 0.0])})
    out = policy_loss(clip_c=clip_c, kl_coef=0.1)(tokens)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert out.loss.isfinite() and gradient.isfinite().all()
    assert gradient[1] == -0.5  # the other token's is what it is alone: -advantage x weight at ratio 1
    assert all(torch.as_tensor(metric.value).isfinite() for metric in out.metrics.values())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_a_token_of_weight_0_does_not_count_whatever_it_holds(value: float) -> None:
    tokens, logp = _tokens([value, -1.0], [-2.0, -1.0], [value, 0.7])
    tokens = replace(
        tokens,
        weights=torch.tensor([0.0, 1.0]),
        columns={**tokens.columns, "ref_logp": torch.tensor([value, -1.2])},
        entropy=torch.tensor([value, 0.5], requires_grad=True),
    )
    out = policy_loss(entropy_coeff=0.1, kl_coef=0.1)(tokens.weighted())
    gradient, of_entropy = torch.autograd.grad(out.loss, (logp, tokens.entropy))
    assert tokens.entropy is not None
    alone = LossInput(
        output=tokens.output[1:],
        entropy=tokens.entropy[1:],
        weights=tokens.weights[1:],
        columns={name: column[1:] for name, column in tokens.columns.items()},
    )
    assert float(out.loss) == float(policy_loss(entropy_coeff=0.1, kl_coef=0.1)(alone).loss)
    assert gradient[0] == 0 and of_entropy[0] == 0 and gradient.isfinite().all()
    assert all(torch.as_tensor(metric.value).isfinite() for metric in out.metrics.values())


def test_policy_loss_clips_each_side() -> None:
    old, new, adv = [0.0] * 6, [0.5, -0.5, 0.1, 0.5, -0.5, 2.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    tokens, logp = _tokens(old, new, adv)
    tokens = replace(tokens, columns={**tokens.columns, "ref_logp": logp.detach()})
    out = policy_loss(clip_c=3.0, entropy_coeff=0.1)(tokens)
    by_hand = []
    for n, a in zip(new, adv, strict=True):
        ratio = math.exp(n)
        loss = max(-a * ratio, -a * min(max(ratio, 0.8), 1.28))
        by_hand.append(min(loss, -a * 3.0) if a < 0 else loss)
    assert float(out.loss) == pytest.approx(sum(by_hand) / 6 - 0.1 * 0.5, rel=1e-6)
    assert float(out.metrics["clipfrac"].value) == pytest.approx(5 / 6)
    assert float(out.metrics["ratio_max_deviation"].value) == pytest.approx(math.exp(2) - 1)
    out.loss.backward()
    assert logp.grad is not None
    moving = [0, -math.exp(-0.5), -math.exp(0.1), math.exp(0.5), 0, 0]  # clipped tokens pull no more
    assert (logp.grad * 6).tolist() == pytest.approx(moving, rel=1e-5)


def test_cross_entropy() -> None:
    tokens, _ = _tokens([0.0] * 2, [-1.0, -3.0], [0.0] * 2)
    assert float(cross_entropy(tokens).loss) == pytest.approx(2.0)

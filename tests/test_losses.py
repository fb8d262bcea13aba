"""Policy losses against plain loops over the cited formulas, however a mini-batch is cut, and on ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.declaration import about_of
from megarl.algorithms.loss import Loss, LossInput, Metric, columns_of, prepared, scope_of
from megarl.algorithms.registry import LOSSES
from megarl.algorithms.regularizers import KlToReference
from megarl.algorithms.rollout_correction import correct_rollouts
from megarl.config.algorithm import RolloutCorrectionConfig
from megarl.config.fields import KlLoss, LossAggMode
from megarl.config.policy import ActorConfig
from megarl.types import Batch, batch_of

LOW, HIGH, TAU_POS, TAU_NEG, KL_COEF = 0.2, 0.3, 0.8, 1.7, 0.25
ACTOR = ActorConfig.model_validate(
    {
        "clip_ratio_low": LOW,
        "clip_ratio_high": HIGH,
        "policy_loss": {
            "tau_pos": TAU_POS,
            "tau_neg": TAU_NEG,
            "clip_cov_ratio": 0.3,
            "clip_cov_lb": 0.1,
            "clip_cov_ub": 4.0,
            "kl_cov_ratio": 0.3,
            "ppo_kl_coef": KL_COEF,
        },
    }
)
NAMES = LOSSES.names()


def _loss(name: str) -> Loss:
    return LOSSES.load(name)(ACTOR)


# ------------------------------------------------------------------------------------------- by the papers' formulas


@dataclass
class Token:
    """A trained token that is not rejected."""

    w: float
    logp: Tensor
    old: float
    adv: float
    selected: bool

    @property
    def log_ratio(self) -> Tensor:
        difference = self.logp - self.old
        return difference if -20 <= difference <= 20 else torch.full_like(difference, 20.0).copysign(difference)

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if ratio < low:
        return torch.full_like(ratio, low)
    return torch.full_like(ratio, high) if ratio > high else ratio


def _ppo(ratio: Tensor, adv: float) -> Tensor:
    clipped = _clip(ratio, 1 - LOW, 1 + HIGH)
    return ratio * adv if ratio * adv < clipped * adv else clipped * adv


def _whole(tokens: list[Token]) -> tuple[float, float]:
    """Weight and advantage of a sequence."""
    weight = sum(t.w for t in tokens)
    return weight, sum(t.w * t.adv for t in tokens) / weight


def _gspo(tokens: list[Token]) -> Tensor:
    weight, adv = _whole(tokens)
    mean = torch.stack([t.log_ratio for t in tokens]).mean()
    return weight * _ppo(mean.exp(), adv)


def _geo_mean(tokens: list[Token]) -> Tensor:
    weight, adv = _whole(tokens)
    product = torch.ones((), dtype=torch.float64)
    for t in tokens:
        clipped = _clip(t.ratio, math.exp(-LOW), math.exp(HIGH))
        product = product * (min(t.ratio, clipped) if t.adv > 0 else max(t.ratio, clipped))
    return weight * adv * product ** (1 / len(tokens))


def _gate(t: Token) -> Tensor:
    tau = TAU_POS if t.adv > 0 else TAU_NEG
    return 4 / tau / (1 + torch.exp(-tau * (t.ratio - 1)))


def _per_token(objective: Callable[[Token], Any]) -> Callable[[list[Token]], Any]:
    return lambda tokens: sum(t.w * objective(t) for t in tokens)


OBJECTIVES: dict[str, Callable[[list[Token]], Any]] = {
    "vanilla": _per_token(lambda t: _ppo(t.ratio, t.adv)),
    "gspo": _gspo,
    "geo_mean": _geo_mean,
    "cispo": _per_token(lambda t: _clip(t.ratio, 1 - LOW, 1 + HIGH).detach() * t.adv * t.logp),
    "sapo": _per_token(lambda t: _gate(t) * t.adv),
    "reinforce": _per_token(lambda t: t.adv * t.logp),
    "clip_cov": _per_token(lambda t: 0.0 if t.selected else _ppo(t.ratio, t.adv)),
    "kl_cov": _per_token(lambda t: t.ratio * t.adv - (KL_COEF * t.log_ratio.abs() if t.selected else 0.0)),
}
"""Loss -> what it maximises, of a sequence's tokens."""


# --------------------------------------------------------------------------------------------- random jagged batches


@dataclass
class Drawn:
    """A mini-batch: all but the last sequence of a batch."""

    batch: Batch
    logp: Tensor
    mode: LossAggMode

    @property
    def sequences(self) -> list[int]:
        return list(range(len(self.batch) - 1))

    def weights(self) -> Tensor:
        return token_weights(self.batch, self.sequences, self.mode, 7).to(self.logp.dtype)


def _draw(lengths: Sequence[int], seed: int, *, far: float, corrected: bool, mode: LossAggMode) -> Drawn:
    """Numbers in float64; a fifth of the tokens has a log-ratio of +-`far`, and rejected tokens hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    n = len(lengths) + 1
    batch = batch_of([[1, 2]] * n, [[i + 3 for i in range(length)] for length in (*lengths, 3)], range(n))
    size = len(batch.tokens)

    def normal() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    logp, advantages = -normal().abs(), normal() + normal()[batch.sequence_of_token]
    old = logp + 0.4 * normal()
    extreme = torch.rand(size, generator=generator) < 0.2
    old = torch.where(extreme, logp + far * normal().sign(), old)
    columns = {"old_logp": old, "advantages": advantages}
    if corrected:
        kept = torch.rand(size, generator=generator) > 0.3
        importance = normal().abs().float().clamp_min(0.01) * kept * batch.response_mask
        logp = torch.where(importance > 0, logp, math.nan)
        columns = {name: torch.where(importance > 0, x, math.nan) for name, x in columns.items()}
        batch = batch.with_(importance=importance)
    return Drawn(batch=batch.with_(**columns), logp=logp, mode=mode)


drawn = st.builds(
    _draw,
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(0, 2**32),
    far=st.sampled_from([0.0, 0.5, 3.0, 1e4]),
    corrected=st.booleans(),
    mode=st.sampled_from(get_args(LossAggMode)),
)


def _input(
    loss: Loss, batch: Batch, weights: Tensor, logp: Tensor, places: Tensor, lengths: Tensor | None
) -> LossInput:
    columns = {name: getattr(batch, name)[places] for name in columns_of(loss) if getattr(batch, name) is not None}
    columns = {name: column.to(logp.dtype) for name, column in columns.items()}
    return LossInput(output=logp[places], weights=weights[places], columns=columns, lengths=lengths).weighted()


def _trained(batch: Batch, sequences: Sequence[int]) -> Tensor:
    spans = [torch.arange(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])) for i in sequences]
    places = torch.cat(spans or [torch.arange(0)])
    return places[batch.response_mask[places]]


def _evaluate(loss: Loss, it: Drawn, cuts: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
    """Loss, gradient and metrics of a mini-batch, its parts called one by one.

    Args:
        cuts: the sequences of each part. A loss that sees any tokens gets each part in two chunks.
    """
    batch = prepared(loss, it.batch, it.sequences)
    logp = it.logp.to(dtype, copy=True).requires_grad_()
    weights, total, metrics = it.weights().to(dtype), torch.zeros((), dtype=dtype), dict[str, float]()
    for sequences in cuts:
        places = _trained(batch, sequences)
        parts: list[tuple[Tensor, Tensor | None]] = [(part, None) for part in places.tensor_split([len(places) // 3])]
        if scope_of(loss) == "sequence":
            parts = [(places, batch.response_lengths[list(sequences)])]
        for part, lengths in parts:
            out = loss(_input(loss, batch, weights, logp, part, lengths))
            total = total + out.loss
            metrics |= {name: metrics.get(name, 0.0) + float(m.value) for name, m in _sums(out.metrics)}
    (gradient,) = torch.autograd.grad(total, logp)
    return total.detach(), gradient, metrics


def _sums(metrics: Any) -> list[tuple[str, Metric]]:
    return [(name, metric) for name, metric in metrics.items() if metric.reduce == "sum"]


def _plain(name: str, it: Drawn) -> tuple[Tensor, Tensor]:
    batch, weights, logp = prepared(_loss(name), it.batch, it.sequences), it.weights(), it.logp.clone().requires_grad_()
    assert batch.old_logp is not None and batch.advantages is not None
    total = 0.0 * logp[:0].sum()
    for i in it.sequences:
        tokens = []
        for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])):
            if weights[t] > 0:
                selected = batch.selected is not None and bool(batch.selected[t])
                old, adv = float(batch.old_logp[t]), float(batch.advantages[t])
                tokens.append(Token(w=float(weights[t]), logp=logp[t], old=old, adv=adv, selected=selected))
        total = total - (OBJECTIVES[name](tokens) if tokens else 0.0)
    (gradient,) = torch.autograd.grad(total, logp)
    return total.detach(), gradient


# -------------------------------------------------------------------------------------------------------- one by one


def test_every_loss_has_a_plain_formula_and_names_its_paper_and_keys() -> None:
    assert set(NAMES) == set(OBJECTIVES)
    for name in NAMES:
        about = about_of(LOSSES.load(name))
        assert about.paper, name
        for key in about.keys:
            section: Any = ACTOR
            for part in key.split(".")[1:]:
                assert part in type(section).model_fields, key
                section = getattr(section, part)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(it=drawn)
def test_value_and_gradient(name: str, it: Drawn) -> None:
    value, gradient, metrics = _evaluate(_loss(name), it, [it.sequences], torch.float64)
    wanted, of_wanted = _plain(name, it)
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, of_wanted, rtol=1e-9, atol=1e-12)
    assert metrics["pg_loss"] == float(value)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(it=drawn, data=st.data())
def test_the_cut_into_micro_batches_and_chunks_changes_nothing(name: str, it: Drawn, data: st.DataObject) -> None:
    order = data.draw(st.permutations(it.sequences))
    ends = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    cuts = [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]  # some may be empty
    value, gradient, metrics = _evaluate(_loss(name), it, [it.sequences], torch.float64)
    again, of_again, its_metrics = _evaluate(_loss(name), it, cuts, torch.float64)
    torch.testing.assert_close(again, value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(of_again, gradient, rtol=1e-12, atol=0)
    assert its_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), corrected=st.booleans())
def test_extreme_ratios_stay_finite_in_float32(name: str, seed: int, corrected: bool) -> None:
    it = _draw([1, 5, 0, 4], seed, far=1e4, corrected=corrected, mode="seq-mean-token-mean")
    value, gradient, metrics = _evaluate(_loss(name), it, [it.sequences], torch.float32)
    assert value.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_gradient_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 all are REINFORCE, where they select nothing."""
    it = _draw([2, 5, 3], 3, far=0.0, corrected=False, mode="seq-mean-token-mean")
    sequence = torch.tensor([0.5, -1.0, 2.0, 1.0])[it.batch.sequence_of_token].double()
    it.batch = it.batch.with_(old_logp=it.logp, advantages=sequence)
    actor = ACTOR.model_copy(update={"policy_loss": ACTOR.policy_loss.model_copy(update={"clip_cov_lb": 4.0})})
    _, gradient, _ = _evaluate(LOSSES.load(name)(actor), it, [it.sequences], torch.float64)
    torch.testing.assert_close(gradient, -it.weights() * sequence, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------------- selection of Clip-Cov


def _covariances(it: Drawn) -> dict[int, float]:
    """Place -> covariance of the mini-batch's tokens."""
    batch, weights = it.batch, it.weights()
    assert batch.old_logp is not None and batch.advantages is not None
    places = [t for t in range(len(batch.tokens)) if weights[t] > 0]
    logp, adv = ([float(x[t]) for t in places] for x in (batch.old_logp, batch.advantages))
    mean = [sum(values) / max(1, len(places)) for values in (logp, adv)]
    return {t: (a - mean[0]) * (b - mean[1]) for t, a, b in zip(places, logp, adv, strict=True)}


def _selected(name: str, batch: Batch, sequences: Sequence[int]) -> set[int]:
    selected = prepared(_loss(name), batch, sequences).selected
    assert selected is not None and set(selected.tolist()) <= {0.0, 1.0} and selected.dtype == torch.float32
    return set(selected.nonzero().squeeze(1).tolist())


@settings(deadline=None, max_examples=40)
@given(it=drawn)
def test_tokens_are_selected_by_covariance(it: Drawn) -> None:
    covariances = _covariances(it)
    count = max(1, int(0.3 * len(covariances)))
    largest = sorted(covariances, key=lambda t: -covariances[t])[:count]
    assert _selected("kl_cov", it.batch, it.sequences) == set(largest)
    band = {t for t, covariance in covariances.items() if 0.1 < covariance < 4.0}
    some = _selected("clip_cov", it.batch, it.sequences)
    assert some <= band and len(some) == min(count, len(band))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_selection_is_that_of_the_mini_batch(name: str) -> None:
    """Neither the order of its sequences, nor rounding, nor the rest of the batch has an influence."""
    it = _draw([5] * 12, 1, far=0.5, corrected=True, mode="token-mean")
    assert it.batch.old_logp is not None
    selected = _selected(name, it.batch, it.sequences)
    assert 3 < len(selected) < 40
    assert _selected(name, it.batch, it.sequences[::-1]) == selected
    rounded = it.batch.with_(old_logp=it.batch.old_logp * (1 + 1e-7))
    assert _selected(name, rounded, it.sequences) == selected
    last = it.batch.sequence_of_token == len(it.batch) - 1
    other = it.batch.with_(old_logp=torch.where(last, -7.0, it.batch.old_logp))
    assert _selected(name, other, it.sequences) == selected


def test_clip_cov_draws_evenly_within_the_band() -> None:
    """Of 40 tokens in the band it takes 18; over 100 batches each comes about as often."""
    counts, n = torch.zeros(40), 100
    for seed in range(n):
        tokens = torch.randint(1000, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        batch = batch_of([[1]], [tokens], [0])
        logp = torch.tensor([0.0] + [-1.0, 1.0] * 20 + [0.0] * 20)
        batch = batch.with_(old_logp=logp, advantages=logp)
        places = [t - 1 for t in _selected("clip_cov", batch, [0])]
        assert len(places) == 18
        counts[places] += 1
    wanted = n * 18 / 40
    assert (counts - wanted).abs().max() < 4.5 * math.sqrt(n * 18 / 40 * 22 / 40)


# ------------------------------------------------------------------------------------------------------ decoupled PPO


def test_truncated_importance_weights_make_it_decoupled_ppo() -> None:
    """AReaL, arXiv 2505.24298, eq. 5: old_logp is the proximal policy's, the engine's the behaviour policy's."""
    it = _draw([4, 1, 6], 2, far=1.0, corrected=False, mode="token-mean")
    generator = torch.Generator().manual_seed(9)
    assert it.batch.old_logp is not None and it.batch.advantages is not None
    behaviour = it.batch.old_logp + 0.7 * torch.randn(len(it.logp), generator=generator, dtype=torch.float64)
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.5)
    it.batch = correct_rollouts(it.batch.with_(rollout_logp=behaviour), correction)
    value, gradient, _ = _evaluate(_loss("vanilla"), it, [it.sequences], torch.float64)

    logp, total, weights = it.logp.clone().requires_grad_(), torch.zeros((), dtype=torch.float64), []
    for t in _trained(it.batch, it.sequences).tolist():
        proximal, adv = float(it.batch.old_logp[t]), float(it.batch.advantages[t])
        weights.append(min(math.exp(proximal - float(behaviour[t])), 1.5))
        total = total - weights[-1] * _ppo((logp[t] - proximal).exp(), adv)
    total = total / len(weights)
    assert max(weights) == 1.5 and min(weights) < 0.9
    torch.testing.assert_close(value, total.detach(), rtol=1e-6, atol=0)  # Batch.importance is float32
    torch.testing.assert_close(gradient, torch.autograd.grad(total, logp)[0], rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------- KL to the reference


def _kl(kind: str, d: float) -> tuple[float, float]:
    """Value and gradient at log p - log q = d."""
    k3 = math.exp(-d) - 1 + d if d > -20 else math.exp(20) - 21
    plain = {
        "k1": (d, 1.0),
        "abs": (abs(d), math.copysign(1.0, d)),
        "k2": (d * d / 2, d),
        "k3": (k3 if d < 20 else math.exp(-20) + 19, 1 - math.exp(-d) if abs(d) < 20 else 0.0),
    }
    return (plain[kind[:2]][0], plain["k2"][1]) if kind.endswith("+") else plain[kind]


@pytest.mark.parametrize("kind", get_args(KlLoss))
def test_kl_addends(kind: KlLoss) -> None:
    logp = torch.tensor([-0.5, -2.0, -1.0, -3.0, -1.0, -1e4], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.7, -0.9, -3.4, -1e4, -1.0], dtype=torch.float64)
    weights = torch.tensor([0.3, 0.2, 0.1, 0.25, 0.1, 0.05], dtype=torch.float64)
    out = KlToReference(coef=0.7, kind=kind)(LossInput(output=logp, weights=weights, columns={"ref_logp": ref}))
    plain = [_kl(kind, d) for d in (logp.detach() - ref).tolist()]
    values, gradients = (torch.tensor(x, dtype=torch.float64) for x in zip(*plain, strict=True))
    torch.testing.assert_close(out.loss.detach(), 0.7 * weights.dot(values), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(out.loss, logp)[0], 0.7 * weights * gradients, rtol=1e-12, atol=0)
    assert float(out.metrics["ref_kl"].value) == pytest.approx(float(weights.dot(values)), rel=1e-12)


@pytest.mark.parametrize("kind", get_args(KlLoss))
def test_expected_gradient_on_policy(kind: KlLoss) -> None:
    """Over all tokens of a small vocabulary, against the gradient of the exact KL to the logits."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()
    exact = (logp.exp() * (logp - ref)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    loss = KlToReference(coef=1.0, kind=kind)(LossInput(output=logp, weights=p, columns={"ref_logp": ref})).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    if kind in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
    else:
        assert (gradient - wanted).abs().max() > 0.1 * wanted.abs().max()
    if kind == "k1":
        assert gradient.abs().max() < 1e-12
    if kind in ("k1", "k3", "k1+", "k3+"):
        assert float(loss) == pytest.approx(float(exact), rel=1e-12)

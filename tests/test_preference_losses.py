"""The losses on preferences and labels, against the formulas in float64, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.bradley_terry import BradleyTerry
from megarl.algorithms.kto import kto
from megarl.algorithms.loss import Loss, LossInput, LossOutput
from megarl.algorithms.preferences.dpo import dpo
from megarl.algorithms.preferences.ipo import ipo
from megarl.algorithms.preferences.orpo import orpo
from megarl.algorithms.preferences.simpo import simpo
from megarl.config.algorithm import PreferenceConfig

LOGP = st.floats(-80, -(2.0**-13), width=32)


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of its tokens under the policy and the reference, and its label."""

    logp: list[float]
    ref: list[float]
    label: float


ANSWERS = st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=4).flatmap(
    lambda tokens: st.builds(
        Answer, st.just([t[0] for t in tokens]), st.just([t[1] for t in tokens]), st.sampled_from([0.0, 1.0])
    )
)
PAIRS = st.lists(st.tuples(ANSWERS, ANSWERS), min_size=1, max_size=4)
PREFERENCES = st.builds(
    PreferenceConfig,
    beta=st.sampled_from([0.05, 0.1, 1.0, 3.0]),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.4]),
    length_normalization=st.booleans(),
    gamma=st.sampled_from([0.0, 0.5, 2.0]),
    sft_coef=st.sampled_from([0.0, 0.3]),
    desirable_weight=st.sampled_from([1.0, 1.5]),
    undesirable_weight=st.sampled_from([1.0, 0.7]),
)
Reference = tuple[float, list[list[float]]]
"""A loss, and its derivative by each log-probability."""


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def _ratio(answer: Answer, mean: bool) -> float:
    ratio = math.fsum(answer.logp) - math.fsum(answer.ref)
    return ratio / len(answer.logp) if mean else ratio


def _mean(answer: Answer) -> float:
    return math.fsum(answer.logp) / len(answer.logp)


def _spread(answer: Answer, slope: float, mean: bool) -> list[float]:
    return [slope / (len(answer.logp) if mean else 1)] * len(answer.logp)


def _supervised(chosen: Answer, coef: float) -> Reference:
    return -coef * _mean(chosen), [_spread(chosen, -coef, True)]


def reference_dpo(chosen: Answer, rejected: Answer, p: PreferenceConfig) -> Reference:
    mean, eps = p.length_normalization, p.label_smoothing
    margin = p.beta * (_ratio(chosen, mean) - _ratio(rejected, mean))
    loss = -(1 - eps) * _log_sigmoid(margin) - eps * _log_sigmoid(-margin)
    slope = p.beta * (eps * _sigmoid(margin) - (1 - eps) * _sigmoid(-margin))
    nll, (extra,) = _supervised(chosen, p.sft_coef)
    own = [a + b for a, b in zip(_spread(chosen, slope, mean), extra, strict=True)]
    return loss + nll, [own, _spread(rejected, -slope, mean)]


def reference_ipo(chosen: Answer, rejected: Answer, p: PreferenceConfig) -> Reference:
    mean = p.length_normalization
    distance = _ratio(chosen, mean) - _ratio(rejected, mean) - 1 / (2 * p.beta)
    nll, (extra,) = _supervised(chosen, p.sft_coef)
    own = [a + b for a, b in zip(_spread(chosen, 2 * distance, mean), extra, strict=True)]
    return distance**2 + nll, [own, _spread(rejected, -2 * distance, mean)]


def reference_simpo(chosen: Answer, rejected: Answer, p: PreferenceConfig) -> Reference:
    margin = p.beta * _mean(chosen) - p.beta * _mean(rejected) - p.gamma * p.beta
    eps = p.label_smoothing
    slope = p.beta * (eps * _sigmoid(margin) - (1 - eps) * _sigmoid(-margin))
    nll, (extra,) = _supervised(chosen, p.sft_coef)
    own = [a + b for a, b in zip(_spread(chosen, slope, True), extra, strict=True)]
    loss = -(1 - eps) * _log_sigmoid(margin) - eps * _log_sigmoid(-margin)
    return loss + nll, [own, _spread(rejected, -slope, True)]


def reference_orpo(chosen: Answer, rejected: Answer, p: PreferenceConfig) -> Reference:
    odds = [_mean(a) - math.log(-math.expm1(_mean(a))) for a in (chosen, rejected)]
    ratio = odds[0] - odds[1]
    slope = -p.beta * _sigmoid(-ratio)
    by_mean = [1 / -math.expm1(_mean(a)) for a in (chosen, rejected)]  # d log odds / d mean
    nll, (extra,) = _supervised(chosen, 1.0)
    own = [a + b for a, b in zip(_spread(chosen, slope * by_mean[0], True), extra, strict=True)]
    return nll - p.beta * _log_sigmoid(ratio), [own, _spread(rejected, -slope * by_mean[1], True)]


def _input(answers: Sequence[Answer], total: int, z: float = 0.0) -> tuple[LossInput, torch.Tensor]:
    """As a micro-batch of them comes from a mini-batch of `total` sequences."""
    logp = torch.tensor([x for a in answers for x in a.logp], requires_grad=True)
    return LossInput(
        output=logp,
        weights=torch.tensor([1 / (total * len(a.logp)) for a in answers for _ in a.logp]),
        columns={
            "ref_logp": torch.tensor([x for a in answers for x in a.ref]),
            "labels": torch.tensor([a.label for a in answers]),
            "reference_point": torch.full((len(answers),), z),
        },
        lengths=torch.tensor([len(a.logp) for a in answers], dtype=torch.int64),
    ), logp


def _compare(out: LossOutput, logp: torch.Tensor, loss: float, gradient: list[float]) -> None:
    (ours,) = torch.autograd.grad(out.loss, logp)
    assert ours.isfinite().all()
    assert float(out.loss) == pytest.approx(loss, rel=1e-4, abs=1e-4)
    scale = max(1.0, *(abs(x) for x in gradient))
    torch.testing.assert_close(ours.double(), torch.tensor(gradient).double(), rtol=1e-3, atol=2e-5 * scale)


CASES: dict[str, tuple[Callable[[PreferenceConfig], Any], Callable[..., Reference]]] = {
    "dpo": (dpo, reference_dpo),
    "ipo": (ipo, reference_ipo),
    "simpo": (simpo, reference_simpo),
    "orpo": (orpo, reference_orpo),
}


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=150)
@given(pairs=PAIRS, preference=PREFERENCES)
def test_pairs(name: str, pairs: list[tuple[Answer, Answer]], preference: PreferenceConfig) -> None:
    factory, reference = CASES[name]
    x, logp = _input([a for pair in pairs for a in pair], 2 * len(pairs))
    out = factory(preference)(x)
    wanted = [reference(*pair, preference) for pair in pairs]
    loss = math.fsum(value for value, _ in wanted) / len(pairs)
    gradient = [d / len(pairs) for _, by_answer in wanted for of_answer in by_answer for d in of_answer]
    _compare(out, logp, loss, gradient)
    log_ratio = _mean if name in ("simpo", "orpo") else lambda a: _ratio(a, preference.length_normalization)
    rewards = [[preference.beta * log_ratio(a) for a in pair] for pair in pairs]
    for metric, wanted_mean in {
        "chosen_reward": math.fsum(r[0] for r in rewards),
        "rejected_reward": math.fsum(r[1] for r in rewards),
        "margin": math.fsum(r[0] - r[1] for r in rewards),
    }.items():
        assert float(out.metrics[metric].value) == pytest.approx(wanted_mean / len(pairs), rel=1e-4, abs=2e-3)
    clear = [r for r in rewards if abs(r[0] - r[1]) > 1e-3]
    if len(clear) == len(rewards):
        right = sum(r[0] > r[1] for r in rewards) / len(pairs)
        assert float(out.metrics["accuracy"].value) == pytest.approx(right, abs=1e-6)


@settings(deadline=None, max_examples=150)
@given(answers=st.lists(ANSWERS, min_size=1, max_size=6), p=PREFERENCES, z=st.floats(0, 100, width=32))
def test_kto(answers: list[Answer], p: PreferenceConfig, z: float) -> None:
    x, logp = _input(answers, len(answers), z)
    loss, gradient, margins = [], [], []
    for a in answers:
        sign, weight = (1, p.desirable_weight) if a.label else (-1, p.undesirable_weight)
        margin = sign * p.beta * (_ratio(a, False) - z)
        loss.append(weight * (1 - _sigmoid(margin)))
        slope = -weight * sign * p.beta * _sigmoid(margin) * _sigmoid(-margin) / len(answers)
        gradient += _spread(a, slope, False)
        margins.append(margin)
    out = kto(p)(x)
    _compare(out, logp, math.fsum(loss) / len(answers), gradient)
    assert float(out.metrics["margin"].value) == pytest.approx(math.fsum(margins) / len(answers), rel=1e-4, abs=1e-3)
    assert float(out.metrics["reference_point"].value) == pytest.approx(z, rel=1e-5)


SCORES = st.floats(-100, 100, width=32)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(SCORES, SCORES, st.floats(0, 5, width=32)), min_size=1, max_size=5))
def test_bradley_terry(pairs: list[tuple[float, float, float]]) -> None:
    scores = torch.tensor([s for pair in pairs for s in pair[:2]], requires_grad=True)
    n = len(pairs)
    x = LossInput(
        output=scores,
        weights=torch.full((2 * n,), 0.5 / n),
        columns={"labels": torch.tensor([margin for *_, margin in pairs]).repeat_interleave(2)},
        lengths=torch.full((2 * n,), 3),
    )
    loss = math.fsum(-_log_sigmoid(a - b - margin) for a, b, margin in pairs) / n
    slopes = [-_sigmoid(-(a - b - margin)) / n for a, b, margin in pairs]
    out = BradleyTerry()(x)
    _compare(out, scores, loss, [s for slope in slopes for s in (slope, -slope)])
    assert float(out.metrics["accuracy"].value) == pytest.approx(sum(a > b for a, b, _ in pairs) / n, abs=1e-6)


@pytest.mark.parametrize("name", [*CASES, "kto"])
@settings(deadline=None, max_examples=50)
@given(pairs=PAIRS, preference=PREFERENCES, at=st.integers(0, 4))
def test_the_parts_of_a_mini_batch_add_up(
    name: str, pairs: list[tuple[Answer, Answer]], preference: PreferenceConfig, at: int
) -> None:
    """Also where a rank's part is empty."""
    loss: Loss = kto(preference) if name == "kto" else CASES[name][0](preference)
    answers, cut = [a for pair in pairs for a in pair], 2 * min(at, len(pairs))
    whole, *parts = (loss(_input(part, len(answers), 1.5)[0]) for part in (answers, answers[:cut], answers[cut:]))
    assert float(whole.loss) == pytest.approx(sum(float(part.loss) for part in parts), rel=1e-5, abs=1e-5)
    for metric, value in whole.metrics.items():
        total = sum(float(part.metrics[metric].value) for part in parts)
        assert float(value.value) == pytest.approx(total, rel=1e-4, abs=1e-3), metric


@pytest.mark.parametrize("name", CASES)
def test_extremes_are_finite(name: str) -> None:
    """Certain answers, impossible ones, and a reference that disagrees."""
    for logp in (0.0, -1e-9, -1e-3, -3e4):
        for other in (0.0, -1e-9, -3e4):
            for n in (1, 3):
                pair = [Answer([logp] * n, [other] * n, 1.0), Answer([other] * n, [logp] * n, 0.0)]
                x, tokens = _input(pair, 2)
                out = CASES[name][0](PreferenceConfig(beta=0.1))(x)
                (gradient,) = torch.autograd.grad(out.loss, tokens)
                assert out.loss.isfinite() and gradient.isfinite().all(), (logp, other)

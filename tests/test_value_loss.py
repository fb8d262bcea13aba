"""The critic's loss and the penalty for long responses, against their formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.loss import LossInput, columns_of
from megarl.algorithms.overlong import soft_overlong_penalty
from megarl.algorithms.returns import explained_variance
from megarl.algorithms.value_loss import ValueLoss
from megarl.types import batch_of


def given_values(new: list[float], old: list[float], returns: list[float], weights: list[float]) -> LossInput:
    return LossInput(
        output=torch.tensor(new, requires_grad=True),
        weights=torch.tensor(weights),
        columns={"values": torch.tensor(old), "returns": torch.tensor(returns)},
    )


NUMBERS = st.integers(-400, 400).map(lambda x: x / 100)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.sampled_from([0.0, 0.25, 1.0])), min_size=0, max_size=12)


@settings(deadline=None)
@given(rows=ROWS, cliprange=st.sampled_from([None, 0.123, 0.511]))
def test_value_loss_and_its_gradient(rows: list[tuple[float, float, float, float]], cliprange: float | None) -> None:
    new, old, returns, weights = ([row[i] for row in rows] for i in range(4))
    x = given_values(new, old, returns, weights)
    out = ValueLoss(cliprange=cliprange)(x)
    (gradient,) = torch.autograd.grad(out.loss, x.output)

    total, slopes, clipped = 0.0, [], 0.0
    for v, o, r, w in rows:
        v, o, r = (float(torch.tensor(a, dtype=torch.float32)) for a in (v, o, r))
        near = v if cliprange is None else min(max(v, o - cliprange), o + cliprange)
        further = (near - r) ** 2 > (v - r) ** 2
        total += w * 0.5 * max((v - r) ** 2, (near - r) ** 2)
        slopes.append(0.0 if further else w * (v - r))  # held where the clipped error is the larger: nothing pulls
        clipped += w * further
    assert float(out.loss) == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-6)
    metrics = {name: float(metric.value) for name, metric in out.metrics.items()}
    assert metrics == {
        "vf_loss": pytest.approx(total, rel=1e-5, abs=1e-6),
        "vf_clipfrac": pytest.approx(clipped, abs=1e-6),
        "vpred_mean": pytest.approx(sum(w * v for v, w in zip(new, weights, strict=True)), rel=1e-4, abs=1e-5),
    }


def test_value_loss_against_autograd_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    v, old, returns = (torch.randn(200, generator=generator) for _ in range(3))
    weights = torch.rand(200, generator=generator)
    x = LossInput(output=v.clone().requires_grad_(), weights=weights, columns={"values": old, "returns": returns})
    out = ValueLoss(cliprange=0.2)(x)

    plain = v.clone().requires_grad_()
    near = torch.minimum(torch.maximum(plain, old - 0.2), old + 0.2)
    loss = (weights * 0.5 * torch.max((plain - returns) ** 2, (near - returns) ** 2)).sum()
    (wanted,), (got,) = torch.autograd.grad(loss, plain), torch.autograd.grad(out.loss, x.output)
    torch.testing.assert_close(got, wanted)
    assert 0.2 < float(out.metrics["vf_clipfrac"].value) / float(weights.sum()) < 0.6


def test_value_loss_by_hand() -> None:
    """From 0 towards a return of 2 with c = 0.5: at 1 the error counts as at 0.5, and at 3 as at 3."""
    x = given_values([1.0, 0.25, 3.0, -1.0], [0.0] * 4, [2.0] * 4, [0.25] * 4)
    out = ValueLoss(cliprange=0.5)(x)
    assert float(out.loss) == 0.25 * 0.5 * (1.5**2 + 1.75**2 + 1.5**2 + 3.0**2)
    assert float(out.metrics["vf_clipfrac"].value) == 0.5
    assert columns_of(ValueLoss(cliprange=0.5)) == ("values", "returns")


def plain_penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """DAPO, arXiv 2503.14476, eq. 13."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return factor * ((longest - buffer) - length) / buffer
    return -factor


@given(
    lengths=st.lists(st.integers(0, 130), max_size=20),
    buffer=st.integers(1, 100),
    factor=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_soft_overlong_penalty(lengths: list[int], buffer: int, factor: float) -> None:
    got = [soft_overlong_penalty(n, max_response_length=100, buffer_len=buffer, penalty_factor=factor) for n in lengths]
    assert got == pytest.approx([plain_penalty(n, 100, buffer, factor) for n in lengths], rel=1e-6)


def test_soft_overlong_penalty_by_hand() -> None:
    got = [
        soft_overlong_penalty(n, max_response_length=100, buffer_len=20, penalty_factor=1.0)
        for n in (0, 80, 85, 100, 120)
    ]
    assert got == [0.0, 0.0, -0.25, -1.0, -1.0]


def test_explained_variance() -> None:
    """Returns 0, 2, 4 of variance 8/3; values off by 0, 1, -1 explain 3/4 of it."""
    batch = batch_of([[1], [1]], [[2, 3], [4]], [0, 1])
    batch = batch.with_(returns=torch.tensor([9.0, 0.0, 2.0, 9.0, 4.0]), values=torch.tensor([0.0, 0.0, 3.0, 0.0, 3.0]))
    assert explained_variance(batch) == pytest.approx(0.75)
    assert explained_variance(batch.with_(returns=torch.ones(5))) == 0.0

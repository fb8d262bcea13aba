"""The sampler against plain numpy loops, its randomness against integer arithmetic, its frequencies against softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.rollout.native.sampler import _inverse_cdf, keep_likeliest, sample, uniform
from megarl.types import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
FILTERS = [(-1, 1.0), (3, 1.0), (1, 1.0), (-1, 0.7), (-1, 0.05), (5, 0.6), (0, 1.0), (1000, 0.9)]


def some_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **kwargs)


def splitmix64(x: int) -> int:
    """Steele et al.'s generator, one step from state x, as printed."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def reference_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """One row's distribution, token by token, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda t: -scaled[t])
    if top_k > 0:
        order = order[:top_k]
    weights = {t: np.exp(scaled[t] - scaled[order[0]]) for t in order}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for t in order:
        if mass >= top_p:
            break
        kept[t] = weights[t]
        mass += weights[t] / total
    out = np.zeros(len(scaled))
    for t, w in kept.items():
        out[t] = w / sum(kept.values())
    return out


def test_splitmix64_reference() -> None:
    # first outputs for seed 1234567, from the reference implementation's published test vector
    assert splitmix64(1234567) == 6457827717110365317


@pytest.mark.parametrize("device", DEVICES)
def test_uniform_is_splitmix64(device: str) -> None:
    seeds = [0, 1, 2, -1, 2**63 - 1, -(2**63), 1234567] * 3
    positions = [0] * 7 + [1] * 7 + [100_000] * 7
    want = [
        (splitmix64((splitmix64(s % 2**64) + p * 0x9E3779B97F4A7C15) % 2**64) >> 12) / 2**52
        for s, p in zip(seeds, positions, strict=True)
    ]
    got = uniform(torch.tensor(seeds, device=device), torch.tensor(positions, device=device))
    assert got.tolist() == want


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (6, 1.0), (-1, 0.8)])
def test_frequencies_match_the_distribution(varied: str, top_k: int, top_p: float) -> None:
    n, vocab = 40_000, 16
    logits = some_logits(1, vocab, seed=3) / 2
    count, fixed = torch.arange(n), torch.full((n,), 7)
    seeds, positions = (count, fixed) if varied == "seed" else (fixed, count)
    out = sample(
        logits.expand(n, vocab), params(temperature=1.5, top_k=top_k, top_p=top_p), seeds=seeds, positions=positions
    )
    want = reference_distribution(logits[0].numpy(), 1.5, top_k, top_p) * n
    got = np.bincount(out.token_ids.numpy(), minlength=vocab)
    assert (got[want == 0] == 0).all()
    chi_square = ((got - want)[want > 0] ** 2 / want[want > 0]).sum()
    assert chi_square < 37.7  # 99.9th percentile at 15 degrees of freedom, above that of fewer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_tokens_and_logp_match_a_plain_loop(device: str, temperature: float, top_k: int, top_p: float) -> None:
    rows, vocab = 200, 50
    logits = some_logits(rows, vocab)
    seeds, positions = torch.arange(rows), torch.arange(rows) % 5
    out = sample(
        logits.to(device),
        params(temperature=temperature, top_k=top_k, top_p=top_p),
        seeds=seeds.to(device),
        positions=positions.to(device),
    )
    u = uniform(seeds, positions).numpy()
    filters_on = 0 < top_k < vocab or top_p < 1
    for i in range(rows):
        p = reference_distribution(logits[i].numpy(), temperature, top_k, top_p)
        # with filters the interval of a token is laid out by rank, without them by token id
        order = np.argsort(-p, kind="stable") if filters_on else np.arange(vocab)
        want = order[np.searchsorted(p[order].cumsum(), u[i], side="right")]
        assert out.token_ids[i] == want
        assert out.logp[i].item() == pytest.approx(np.log(p[want]), abs=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_support_of_the_filters(top_k: int, top_p: float) -> None:
    logits = some_logits(100, 40, seed=1)
    kept, order = keep_likeliest(logits, top_k=top_k, top_p=top_p)
    for i in range(len(logits)):
        want = np.flatnonzero(reference_distribution(logits[i].numpy(), 1.0, top_k, top_p))
        assert sorted(order[i][kept[i].isfinite()].tolist()) == want.tolist()


def test_top_k_keeps_ties() -> None:
    kept, order = keep_likeliest(torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0]]), top_k=2, top_p=1.0)
    assert order[kept.isfinite()].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 0.8)])
def test_row_alone_equals_row_in_batch(top_k: int, top_p: float) -> None:
    logits, seeds, positions = some_logits(70, 333), torch.arange(70) * 17, torch.arange(70)
    how = params(temperature=0.8, top_k=top_k, top_p=top_p)
    batch = sample(logits, how, seeds=seeds, positions=positions)
    for i in range(70):
        alone = sample(logits[i : i + 1], how, seeds=seeds[i : i + 1], positions=positions[i : i + 1])
        assert (alone.token_ids[0], alone.logp[0]) == (batch.token_ids[i], batch.logp[i])


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    logits = some_logits(20, 50)
    out = sample(logits, params(temperature=0.0), seeds=torch.zeros(20).long(), positions=torch.zeros(20).long())
    assert torch.equal(out.token_ids, logits.argmax(-1))
    torch.testing.assert_close(out.logp, logits.log_softmax(-1).amax(-1))


def test_temperature_one_without_filters_is_the_model() -> None:
    logits = some_logits(20, 50)
    out = sample(logits, params(), seeds=torch.arange(20), positions=torch.arange(20))
    torch.testing.assert_close(out.logp, logits.log_softmax(-1)[torch.arange(20), out.token_ids])


def test_large_vocabulary_stays_exact() -> None:
    vocab, want = 150_000, torch.arange(0, 150_000, 2_500)
    u = (want.double() + 1e-3) / vocab  # just inside the token's interval, by less than float32 resolves
    assert torch.equal(_inverse_cdf(torch.zeros(len(u), vocab), u), want)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-52])
def test_impossible_tokens_are_never_drawn(u: float) -> None:
    logits = some_logits(500, 30)
    logits[:, ::2] = -torch.inf
    logits[:, 25:] = -torch.inf
    token = _inverse_cdf(logits, torch.full((500,), u, dtype=torch.float64))
    assert (token == (1 if u == 0 else 23)).all()


def test_nan_logits_come_out_as_nan_logp() -> None:
    logits = torch.full((2, 10), torch.nan)
    for how in (params(), params(top_k=3, top_p=0.5), params(temperature=0.0)):
        out = sample(logits, how, seeds=torch.arange(2), positions=torch.arange(2))
        assert out.logp.isnan().all() and (out.token_ids < 10).all()

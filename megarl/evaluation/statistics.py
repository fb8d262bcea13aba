"""Computes estimates from several samples per prompt, and their uncertainty. Torch-free.

Samples of one prompt are not independent, so the unit is the prompt. An estimate is a mean over prompts with the
standard error of independent prompts. If all prompts have the same number of samples, this equals the clustered
standard error (Miller 2024, arXiv 2411.00640, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054
"""Half the width of a 95% confidence interval, in standard errors."""

EXACT_COST = 4096
"""n times k up to which maj@k is computed over all subsets; above that, over `SUBSETS` random subsets."""

SUBSETS = 1000
_SEED = 20240716


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds a mean over prompts.

    Attributes:
        ci95: half the width of the 95% confidence interval; None if all values are equal.
        n: number of prompts.
    """

    mean: float
    ci95: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Estimate the mean of one value per prompt, with 1.96 standard errors (central limit theorem). No prompts: None.

    The interval is somewhat too narrow for a dozen prompts. It is None if all values are equal: 20 prompts that all
    fail do not show that no prompt would succeed.
    """
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if min(values) == max(values):
        return Estimate(mean=values[0], ci95=None, n=n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Estimate(mean=mean, ci95=Z * math.sqrt(variance / n), n=n)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Compute the probability that k of n samples, of which c are right, hold a right one: 1 - C(n-c, k) / C(n, k).

    This is the unbiased estimator (Chen et al. 2021, arXiv 2107.03374, eq. 1) as a product that does not overflow.
    5 samples, 2 right, k = 2: 1 - 3/10 = 0.7.
    """
    assert 0 <= c <= n and 1 <= k <= n
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[float], k: int) -> float:
    """Compute the expected correctness of the most frequent answer of k samples (Wang et al. 2022, arXiv 2203.11171).

    The expectation is over all subsets of k samples, and over a fair draw among equally frequent answers. It is exact
    while n times k is at most `EXACT_COST`, else a mean over `SUBSETS` random subsets, the same in every process.
    Answers a, a, b with a right, k = 2: {a, a} gives 1, {a, b} twice 1/2, so 2/3.

    Args:
        answers: one per sample. None casts no vote; without any vote the value is 0.
        correct: correctness of each sample, 0 to 1. An answer's correctness is the mean over its samples.
    """
    n = len(answers)
    assert len(correct) == n and 1 <= k <= n
    places: dict[Hashable | None, list[int]] = {}
    for i, answer in enumerate(answers):
        places.setdefault(answer, []).append(i)
    silent = len(places.pop(None, []))
    counts = [len(samples) for samples in places.values()]
    values = [math.fsum(correct[i] for i in samples) / len(samples) for samples in places.values()]
    if not counts:
        return 0.0
    if k == n:
        return _vote(counts, values)
    if n * k <= EXACT_COST:
        return _expected_vote(counts, values, silent, k)
    subsets = np.random.default_rng(_SEED).multivariate_hypergeometric([*counts, silent], k, size=SUBSETS)
    return math.fsum(_vote(row[:-1].tolist(), values) for row in subsets) / SUBSETS


def _vote(counts: Sequence[int], values: Sequence[float]) -> float:
    most = max(counts)
    if most == 0:
        return 0.0
    won = [value for count, value in zip(counts, values, strict=True) if count == most]
    return math.fsum(won) / len(won)


def _expected_vote(counts: Sequence[int], values: Sequence[float], silent: int, k: int) -> float:
    """Average over all subsets of k: for each winning number of votes v, count the subsets in which no answer has more.

    ways[s, t]: number of ways in which the answers so far get s votes in total, and t answers get v votes each.
    won[s, t]: the same, each way multiplied by the sum of the values of these t answers.
    """
    total = 0.0
    for v in range(1, min(k, max(counts)) + 1):
        ways = np.zeros((k + 1, k // v + 2))
        won = np.zeros_like(ways)
        ways[0, 0] = 1.0
        for count, value in zip(counts, values, strict=True):
            next_ways, next_won = np.zeros_like(ways), np.zeros_like(won)
            for u in range(min(v - 1, count) + 1):
                subsets = math.comb(count, u)
                next_ways[u:] += subsets * ways[: k + 1 - u]
                next_won[u:] += subsets * won[: k + 1 - u]
            if count >= v:
                subsets = math.comb(count, v)
                next_ways[v:, 1:] += subsets * ways[: k + 1 - v, :-1]
                next_won[v:, 1:] += subsets * (won[: k + 1 - v, :-1] + value * ways[: k + 1 - v, :-1])
            ways, won = next_ways, next_won
        of_silent = [math.comb(silent, k - s) for s in range(k + 1)]
        ties = np.arange(1, won.shape[1])
        total += float(np.dot(of_silent, (won[:, 1:] / ties).sum(1)))
    return total / math.comb(sum(counts) + silent, k)


def powers_of_two(n: int) -> tuple[int, ...]:
    """List 1, 2, 4 ... up to n, and n itself: 12 -> 1, 2, 4, 8, 12."""
    return tuple(sorted({2**i for i in range(n.bit_length())} | {n}))


# ------------------------------------------------------------------------------------------------------ two models


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Compares A with B over the same prompts.

    Attributes:
        difference: A minus B, paired by prompt (Miller 2024, arXiv 2411.00640, section 4.2).
        p: probability of a difference at least as large if A and B were equally good.
        test: the test that gave p: "McNemar" (exact), "permutation" (exact) or "permutation (sampled)".
        a_only, b_only: numbers of prompts where A's value is larger, and where B's is.
    """

    difference: Estimate
    p: float
    test: str
    a_only: int
    b_only: int


EXACT_SIGNS = 16
"""Number of differing prompts up to which all signs are tried."""

SIGNS = 20_000
"""Number of random sign vectors above that: p is never below 1 / (SIGNS + 1)."""


def paired(a: Sequence[float], b: Sequence[float]) -> Paired | None:
    """Compare one value per prompt and model, prompts in the same order; None without prompts.

    If all differences are -1, 0 or 1, p is McNemar's exact p (binomial over prompts that only one model solves), else
        that of the sign-flip permutation test, of which McNemar's is a special case.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean = estimate(differences)
    if mean is None:
        return None
    nonzero = [d for d in differences if d]
    a_only = sum(d > 0 for d in nonzero)
    p, test = _p_value(nonzero, a_only)
    return Paired(difference=mean, p=p, test=test, a_only=a_only, b_only=len(nonzero) - a_only)


def _p_value(nonzero: Sequence[float], positive: int) -> tuple[float, str]:
    if all(abs(d) == 1.0 for d in nonzero):
        return mcnemar(positive, len(nonzero) - positive), "McNemar"
    d = np.array(nonzero)
    observed = abs(d.sum()) * (1 - 1e-9)  # sums of the same numbers in another order differ in their last bits
    if len(d) <= EXACT_SIGNS:
        signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
        return float((np.abs(signs @ d) >= observed).mean()), "permutation"
    rng, as_large = np.random.default_rng(_SEED), 0
    for _ in range(SIGNS // 1000):
        random: NDArray[np.int64] = 1 - 2 * rng.integers(0, 2, (1000, len(d)))
        as_large += int((np.abs(random @ d) >= observed).sum())
    return (as_large + 1) / (SIGNS + 1), "permutation (sampled)"


def mcnemar(a_only: int, b_only: int) -> float:
    """Compute the exact two-sided p of McNemar's test: min(1, 2 P(X <= min)), X binomial(a_only + b_only, 1/2).

    5, 0: 2/32.
    """
    n = a_only + b_only
    tail = sum(math.comb(n, i) for i in range(min(a_only, b_only) + 1))
    return min(1.0, 2 * tail / 2**n)

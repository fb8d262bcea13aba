"""Computes numbers about all trained tokens of a batch, whichever ranks have them: every rank calls these functions,
and gets the same bits, however many ranks there are.

A rank has R of the tokens; what it knows of them are vectors [R], as `Batch.trained` gives them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.types import Batch
from megarl.types.batch import reduced

_SIGN = 1 << 31


def count(batch: Batch) -> int:
    """Count the trained tokens of all ranks."""
    return int(batch.response_lengths.sum())


def total(batch: Batch, x: Tensor) -> Tensor:
    """Add up [R] -> float64 scalar: first over each sequence, then over the sequences in their order."""
    return _per_sequence(batch, x, "sum").sum()


def mean(batch: Batch, x: Tensor) -> float:
    """Average the values [R] of all ranks; NaN if there are none."""
    return float(total(batch, x) / count(batch))


def extremes(batch: Batch, x: Tensor) -> tuple[float, float]:
    """Find the least and the largest of [R]; there is one, at least."""
    return float(_per_sequence(batch, x, "min").min()), float(_per_sequence(batch, x, "max").max())


def variance(batch: Batch, x: Tensor, correction: int = 0) -> float:
    """Compute the variance of float64 [R] around its mean; `correction` 1 is unbiased."""
    return float(total(batch, (x - mean(batch, x)).square()) / (count(batch) - correction))


def percentiles(batch: Batch, x: Tensor, percents: tuple[int, ...]) -> list[float]:
    """Pick of float32 [R], in order, the ones at round((n - 1) percent / 100), where n is the number over all ranks.

    NaN comes last. It counts them by the upper, then by the lower half of their bits: no rank has to see them all.
    """
    upper = _histogram(batch, x, None).cumsum(0)
    picked = []
    for percent in percents:
        place = round((count(batch) - 1) * percent / 100)
        high = int((upper <= place).sum())
        place -= int(upper[high - 1]) if high else 0
        lower = _histogram(batch, x, high).cumsum(0)
        picked.append((high << 16) + int((lower <= place).sum()) - _SIGN)
    signed = torch.tensor(picked)
    return torch.where(signed < 0, -1 - signed - _SIGN, signed).int().view(torch.float32).tolist()


def _histogram(batch: Batch, x: Tensor, high: int | None) -> Tensor:
    """Count the numbers of all ranks by the upper half of their bits or, of those with one upper half, by the lower."""
    counts = torch.zeros(1 << 16, dtype=torch.int64)
    for part in x.split(1 << 20):
        bits = torch.where(part.isnan(), torch.nan, part).view(torch.int32).long()  # a NaN may have a sign
        keys = torch.where(bits < 0, -1 - bits - _SIGN, bits) + _SIGN  # ascending as the numbers do, from 0
        keys = keys >> 16 if high is None else keys[keys >> 16 == high] & 0xFFFF
        counts += keys.bincount(minlength=1 << 16)
    return counts if batch.owners is None else batch.owners.sum_(counts)


def _per_sequence(batch: Batch, x: Tensor, kind: Literal["sum", "min", "max"]) -> Tensor:
    """Reduce [R] over each sequence with trained tokens, of all ranks: float64."""
    own = reduced(x, batch.own_response_lengths, kind, dtype=torch.float64)
    return batch.of_all(own)[batch.response_lengths > 0]

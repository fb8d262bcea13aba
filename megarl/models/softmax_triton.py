"""Computes `megarl.models.softmax` in Triton: one pass over the chunk each (online softmax, arXiv 1805.02867)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def statistics(logits: Tensor, labels: Tensor, valid: int, temperature: float) -> tuple[Tensor, Tensor]:
    """See `megarl.models.softmax.statistics`."""
    assert logits.stride(-1) == 1
    rows = len(logits)
    peak = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _statistics[(rows,)](
            logits, labels, peak, sums, logits.stride(0), rows, valid, 1 / temperature, BLOCK=_BLOCK, num_warps=8
        )
    return peak, sums


def gradient_(
    logits: Tensor,
    labels: Tensor,
    valid: int,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """See `megarl.models.softmax.gradient_`."""
    assert logits.stride(-1) == 1
    rows, columns = logits.shape
    if rows:
        _gradient[(rows, triton.cdiv(columns, _BLOCK))](
            logits,
            labels,
            normaliser,
            entropy,
            grad_logp.contiguous(),
            grad_logp if grad_entropy is None else grad_entropy.contiguous(),
            logits.stride(0),
            columns,
            valid,
            1 / temperature,
            ENTROPY=grad_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return logits


@triton.jit
def _statistics(logits, labels, peak_out, sums_out, stride, rows, valid, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    peak = -1e30  # not -inf, which is nan when it is subtracted from itself
    exp_sums = tl.zeros((BLOCK,), tl.float32)
    weighted_sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < valid, other=-1e30).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(x, 0))
        # what is summed so far is relative to the old peak
        shift = peak - higher
        shrink = tl.exp(shift)
        weighted_sums = (weighted_sums + exp_sums * shift) * shrink
        exp_sums = exp_sums * shrink
        peak = higher
        x -= peak
        exp = tl.where(columns < valid, tl.exp(x), 0.0)
        exp_sums += exp
        weighted_sums += exp * x
    label = tl.load(labels + row)
    here = (label >= 0) & (label < valid)
    at_label = tl.load(logits + label, mask=here, other=0.0).to(tl.float32) * scale - peak
    tl.store(peak_out + row, peak)
    tl.store(sums_out + row, tl.sum(exp_sums, 0))
    tl.store(sums_out + rows + row, tl.sum(weighted_sums, 0))
    tl.store(sums_out + 2 * rows + row, tl.where(here, at_label, 0.0))


@triton.jit
def _gradient(
    logits,
    labels,
    normaliser,
    entropy,
    grad_logp,
    grad_entropy,
    stride,
    width,
    valid,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < valid
    x = tl.load(logits + columns, mask=inside, other=-1e30).to(tl.float32) * scale
    log_p = x - tl.load(normaliser + row)
    pull = tl.load(grad_logp + row)
    grad = tl.where(columns == tl.load(labels + row), pull, 0.0)
    if ENTROPY:
        grad -= tl.exp(log_p) * (pull + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row)))
    else:
        grad -= tl.exp(log_p) * pull
    grad = tl.where(inside, grad * scale, 0.0)
    tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < width)

"""Computes softmax statistics and gradients of a chunk of logits: torch's operators, or on GPUs one Triton kernel each.

The torch form is the reference. It makes several fp32 copies of the chunk; the kernels read it once, in the weights'
precision, and write the gradient over it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.kernels import TRITON


def statistics(logits: Tensor, labels: Tensor, valid: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Sum up one shard of the vocabulary for the log-probabilities and entropies of some rows.

    With x = logits / temperature and peak = max x:

    Args:
        logits: [rows, columns].
        labels: int64 [rows], column of each row's label; outside [0, valid) where another shard has it.
        valid: columns that mean something; the rest is padding.

    Returns:
        peak: float32 [rows].
        sums: float32 [3, rows]: sum exp(x - peak), sum exp(x - peak) (x - peak), and x[label] - peak or, where another
            shard has the label, 0.
    """
    if TRITON and logits.is_cuda:
        from megarl.models import softmax_triton

        return softmax_triton.statistics(logits, labels, valid, temperature)
    x = logits[:, :valid].float() / temperature
    # a shard may hold nothing but padding; -1e30 rather than -inf, which is nan when it is subtracted from itself
    peak = x.amax(-1) if valid else x.new_full((len(x),), -1e30)
    x = x - peak.unsqueeze(-1)
    exp = x.exp()
    local, here = _in_shard(labels, valid)
    label = torch.where(here, x.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0) if valid else torch.zeros_like(peak)
    return peak, torch.stack((exp.sum(-1), (exp * x).sum(-1), label))


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
    """Overwrite logits with the gradient of a loss by them; returns the same tensor.

    d logp / d x_j = 1[j = label] - p_j and d entropy / d x_j = -p_j (log p_j + entropy).

    Args:
        normaliser: float32 [rows], log sum exp x over the whole vocabulary.
        entropy: float32 [rows], nats.
        grad_logp, grad_entropy: float32 [rows], the loss's gradients; no entropy in the loss: None.
    """
    if TRITON and logits.is_cuda:
        from megarl.models import softmax_triton

        return softmax_triton.gradient_(
            logits, labels, valid, temperature, normaliser, entropy, grad_logp, grad_entropy
        )
    log_p = logits[:, :valid].float() / temperature - normaliser.unsqueeze(-1)
    pull = grad_logp.unsqueeze(-1)
    if grad_entropy is not None:
        pull = pull + grad_entropy.unsqueeze(-1) * (log_p + entropy.unsqueeze(-1))
    grad = -log_p.exp() * pull
    local, here = _in_shard(labels, valid)
    if valid:
        grad.scatter_add_(-1, local.unsqueeze(-1), (grad_logp * here).unsqueeze(-1))
    logits[:, :valid] = (grad / temperature).to(logits.dtype)
    logits[:, valid:] = 0
    return logits


def _in_shard(labels: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Give labels that index a column in any case, and whether they are this shard's."""
    here = (labels >= 0) & (labels < valid)
    return torch.where(here, labels, 0), here

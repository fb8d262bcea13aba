"""Log-probabilities and entropy of labels from hidden states: vocab-parallel, chunked over tokens.

The logits of a chunk are computed, reduced over the tensor-parallel group and dropped; the backward pass computes
them again. Nothing of size [tokens, vocab] outlives a chunk, in any precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's columns of the vocabulary.

    Attributes:
        group: the tensor-parallel group.
        start: first vocabulary entry held here.
        valid: entries held here that mean something; the rest is padding and gets probability 0.
    """

    group: dist.ProcessGroup
    start: int
    valid: int


def vocab_shard(vocab_size: int, padded: int, group: dist.ProcessGroup) -> VocabShard:
    """The shard of a vocabulary that is padded to a multiple of the tensor-parallel size."""
    rows = padded // group.size()
    start = group.rank() * rows
    return VocabShard(group=group, start=start, valid=max(0, min(rows, vocab_size - start)))


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, *, temperature: float, chunk_size: int = 2048
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and entropy, under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [tokens, hidden_size], the same on every tensor-parallel rank. Its gradient comes back complete.
        weight: [vocab / tp, hidden_size].
        labels: int64 [tokens].
        temperature: > 0.
        chunk_size: tokens whose logits are alive at once.

    Returns:
        log-probabilities and entropies, float32 [tokens], in nats; both differentiable.
    """
    return _TokenLogProbs.apply(hidden, weight, labels, shard, temperature, chunk_size)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in _parts(len(hidden), chunk):
            logits = _logits(hidden[part], weight, shard, temperature)
            peak = logits.amax(-1) if shard.valid else logits.new_full((len(logits),), -torch.inf)
            _all_reduce(peak, shard, dist.ReduceOp.MAX)
            shifted = logits - peak.unsqueeze(-1)
            exp = shifted.exp()
            local, own = _local_labels(labels[part], shard)
            label_logit = torch.where(own, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
            # padding columns are -inf with probability 0: 0 * -inf must not become nan
            weighted = (exp * shifted.clamp_min(-1e30)).sum(-1)
            sums = torch.stack((exp.sum(-1), weighted, label_logit))
            _all_reduce(sums, shard, dist.ReduceOp.SUM)
            log_z = sums[0].log()
            logp[part] = sums[2] - log_z
            entropy[part] = log_z - sums[1] / sums[0]
            normaliser[part] = log_z + peak
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(len(hidden), ctx.chunk):
            # d logp[label] / d logit_j = 1[j = label] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            log_p = _logits(hidden[part], weight, ctx.shard, ctx.temperature) - normaliser[part].unsqueeze(-1)
            p = log_p.exp()
            pull = grad_logp[part].unsqueeze(-1) + grad_entropy[part].unsqueeze(-1) * (
                log_p.clamp_min(-1e30) + entropy[part].unsqueeze(-1)
            )
            grad_logits = -p * pull
            local, own = _local_labels(labels[part], ctx.shard)
            grad_logits.scatter_add_(-1, local.unsqueeze(-1), (grad_logp[part] * own).unsqueeze(-1))
            grad_logits = (grad_logits / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += (grad_logits.t() @ hidden[part]).float()
        _all_reduce(grad_hidden, ctx.shard, dist.ReduceOp.SUM)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _parts(tokens: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, tokens)) for i in range(0, tokens, chunk)]


def _logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """fp32 [chunk, vocab / tp], padding columns at -inf."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits /= temperature
    logits[:, shard.valid :] = -torch.inf
    return logits


def _local_labels(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Labels as columns of this shard (0 where another rank has them), and whether this rank has them."""
    local = labels - shard.start
    own = (local >= 0) & (local < shard.valid)
    return torch.where(own, local, 0), own


def _all_reduce(x: Tensor, shard: VocabShard, op: dist.ReduceOp.RedOpType) -> None:
    if shard.group.size() > 1:
        dist.all_reduce(x, op, group=shard.group)

"""Computes log-probabilities and entropies of labels from hidden states: vocab-parallel, chunked over tokens.

The logits of a chunk are computed, reduced over the tensor-parallel group and dropped. Nothing of size [tokens, vocab]
outlives a chunk, in any precision. A loss that is a sum over tokens takes its gradient chunk by chunk too, while the
logits are there (`token_loss`); for any other the backward pass computes them again (`token_log_probs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.sizes import LOGITS_CHUNK_BYTES
from megarl.models.softmax import gradient_, statistics
from megarl.models.weight_gradient import add_weight_gradient

ChunkLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""(log-probabilities, entropies, which of the tokens) -> the chunk's part of a loss that is a sum over tokens."""


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Locates this rank's columns of the vocabulary.

    Attributes:
        group: the tensor-parallel group.
        start: first vocabulary entry held here.
        valid: entries held here that mean something; the rest is padding and gets probability 0.
    """

    group: dist.ProcessGroup
    start: int
    valid: int


def vocab_shard(vocab_size: int, padded: int, group: dist.ProcessGroup) -> VocabShard:
    """Locate the shard of a vocabulary that is padded to a multiple of the tensor-parallel size."""
    rows = padded // group.size()
    start = group.rank() * rows
    return VocabShard(group=group, start=start, valid=max(0, min(rows, vocab_size - start)))


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute each label's log-probability, and entropies, under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [tokens, hidden_size], the same on every tensor-parallel rank. Its gradient comes back complete.
        weight: [vocab / tp, hidden_size].
        labels: int64 [tokens].
        temperature: > 0.
        chunk_size: tokens whose logits are alive at once; default: as many as LOGITS_CHUNK_BYTES holds.

    Returns:
        log-probabilities and entropies, float32 [tokens], in nats; both differentiable.
    """
    return _TokenLogProbs.apply(hidden, _Head(weight, shard, temperature), weight, labels, chunk_size)


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    loss: ChunkLoss,
    *,
    temperature: float,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute a loss that is a sum over tokens, and its gradient, in the forward pass: logits are computed once.

    Where Megatron-Core keeps an fp32 gradient buffer (`weight.main_grad`), the weight's gradient is added to it right
    away, so the loss must be differentiated once and as it is, not scaled.

    Args:
        loss: called for one chunk after the other; its results add up.

    The other arguments are those of `token_log_probs`, and so are, bit by bit, the log-probabilities.
    """
    return _TokenLoss.apply(hidden, _Head(weight, shard, temperature), weight, labels, loss, chunk_size)


@dataclass(frozen=True)
class _Head:
    """Is the output layer: chunks of hidden states to log-probabilities, and their gradients back."""

    weight: Tensor
    shard: VocabShard
    temperature: float

    def parts(self, tokens: int, chunk_size: int | None) -> list[slice]:
        fit = LOGITS_CHUNK_BYTES // (self.weight.shape[0] * self.weight.element_size())
        size = chunk_size or max(128, fit // 128 * 128)  # matrix products like multiples of their tiles
        return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()

    def columns(self, labels: Tensor) -> Tensor:
        """Turn labels into columns of this shard; outside [0, valid) where another rank has them."""
        return labels - self.shard.start

    def log_probs(self, logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities of the labels, entropies and normalisers (log sum exp), float32 [chunk]."""
        valid = self.shard.valid
        peak, sums = statistics(logits, columns, valid, self.temperature)
        if self.shard.group.size() > 1:
            highest = peak.clone()
            self.all_reduce(highest, dist.ReduceOp.MAX)
            exp_sum, weighted, label = sums
            shift = peak - highest
            here = (columns >= 0) & (columns < valid)
            sums = torch.stack((exp_sum, weighted + exp_sum * shift, torch.where(here, label + shift, 0.0)))
            sums[:2] *= shift.exp()
            self.all_reduce(sums, dist.ReduceOp.SUM)
            peak = highest
        log_sum = sums[0].log()
        return sums[2] - log_sum, log_sum - sums[1] / sums[0], log_sum + peak

    def grad_logits_(
        self,
        logits: Tensor,
        columns: Tensor,
        normaliser: Tensor,
        entropy: Tensor,
        grad_logp: Tensor,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        return gradient_(
            logits, columns, self.shard.valid, self.temperature, normaliser, entropy, grad_logp, grad_entropy
        )

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.shard.group.size() > 1:
            dist.all_reduce(x, op, group=self.shard.group)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: _Head, weight: Tensor, labels: Tensor, chunk_size: int | None
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        columns = head.columns(labels)
        for part in head.parts(len(hidden), chunk_size):
            logp[part], entropy[part], normaliser[part] = head.log_probs(head.logits(hidden[part]), columns[part])
        ctx.save_for_backward(hidden, columns, normaliser, entropy)
        ctx.head, ctx.chunk_size = head, chunk_size
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, columns, normaliser, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        grad_logp, grad_entropy = grads
        if grad_logp is None:
            grad_logp = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden)
        gradient = _Gradient(head.weight)
        for part in head.parts(len(hidden), ctx.chunk_size):
            grad_logits = head.grad_logits_(
                head.logits(hidden[part]),
                columns[part],
                normaliser[part],
                entropy[part],
                grad_logp[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            torch.mm(grad_logits, head.weight, out=grad_hidden[part])
            gradient.add(grad_logits, hidden[part])
            del grad_logits  # or the next chunk's logits would be a second one
        head.all_reduce(grad_hidden, dist.ReduceOp.SUM)
        return grad_hidden, None, gradient.result(), None, None


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: _Head,
        weight: Tensor,
        labels: Tensor,
        loss: ChunkLoss,
        chunk_size: int | None,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        gradient = _Gradient(weight)
        columns = head.columns(labels)
        for part in head.parts(len(hidden), chunk_size):
            logits = head.logits(hidden[part])
            logp, entropy, normaliser = head.log_probs(logits, columns[part])
            with torch.enable_grad():
                value = loss(logp.requires_grad_(), entropy.requires_grad_(), part)
                grad_logp, grad_entropy = torch.autograd.grad(
                    value, (logp, entropy), allow_unused=True, materialize_grads=False
                )
            total += value.detach()
            if grad_logp is None:
                grad_logp = torch.zeros_like(normaliser)
            logits = head.grad_logits_(logits, columns[part], normaliser, entropy.detach(), grad_logp, grad_entropy)
            torch.mm(logits, weight, out=grad_hidden[part])
            gradient.add(logits, hidden[part])
            del logits  # or the next chunk's would be a second one
        head.all_reduce(grad_hidden, dist.ReduceOp.SUM)
        ctx.grad_hidden, ctx.gradient = grad_hidden, gradient
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.grad_hidden.mul_(grad_loss), ctx.gradient.result(grad_loss)
        ctx.grad_hidden = ctx.gradient = None
        return grad_hidden, None, grad_weight, None, None, None


class _Gradient:
    """Adds up the gradient of the output weight in fp32: in its `main_grad`, where it has one; none if it is frozen."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self._sum: Tensor | None = getattr(weight, "main_grad", None)
        self._arrives = self._sum is not None
        if weight.requires_grad and not self._arrives:
            self._sum = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self._sum is not None:
            add_weight_gradient(self._sum, grad_logits, hidden)

    def result(self, scale: Tensor | float = 1.0) -> Tensor | None:
        """Give autograd the gradient, times `scale` unless `main_grad` has it already."""
        if self._sum is None:
            return None
        return _arrived(self._weight) if self._arrives else self._sum.mul_(scale).to(self._weight.dtype)


def _arrived(weight: Any) -> Tensor:
    """Stand in for the gradient of a weight whose `main_grad` has it already.

    Autograd needs one, to call Megatron-Core's hooks. These are told to leave it, and it is `main_grad` itself, so that
    it takes no memory.

    A tied weight gets the embedding's gradient too, which autograd adds to this one: zeros.
    """
    if getattr(weight, "zero_out_wgrad", False) or not hasattr(weight, "grad_added_to_main_grad"):
        zeros: Tensor = weight.new_zeros(())
        return zeros.expand_as(weight)
    main_grad: Tensor = weight.main_grad
    weight.grad_added_to_main_grad = True
    return main_grad.view(-1).view(weight.dtype)[: weight.numel()].view_as(weight)

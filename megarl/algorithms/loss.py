"""Defines the input and output of a loss. Losses have their denominator in the weights and know no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from megarl.algorithms.changed_batch import changed_by
from megarl.own_code import OwnCodeError, name_of, torch_as_before
from megarl.types import Batch

Scope = Literal["token", "sequence", "pair"]
"""What a loss must see at once: any of a mini-batch's tokens; whole sequences; or both responses of a pair, which are
neighbours in the batch, the better one first."""

Reduce = Literal["sum", "max", "first"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Holds a number about an update, to which its micro-batches and ranks contribute.

    Attributes:
        value: a scalar.
        reduce: `sum` adds over micro-batches and ranks, and a step reports the mean over its updates; `max` takes the
            largest of all; `first` takes the largest within the step's first update, where the policy is still the one
            that generated.
    """

    value: Tensor | float
    reduce: Reduce = "sum"


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """Holds what a model's head computed for R of the trained tokens, or for S whole sequences, of a mini-batch.

    Where a weight is 0, so is everything else: a token is rejected because its values are extreme, and 0 x infinity is
    NaN, in a loss as in its gradient.

    Attributes:
        output: float32, differentiable: [R] log-probabilities in nats of a language model's head, [R] values of a value
            head, [S] scores of a score head.
        weights: shape of the output, shares of the mini-batch's loss: the global denominator is in them.
        entropy: float32 [R], differentiable, nats; of a language model's head alone.
        columns: the columns of the batch that the loss names: float32 [R]; those with a value per sequence are [S], or
            [R], the sequence's value at each of its tokens, if the loss has the scope of tokens.
        lengths: int64 [S], trained tokens per sequence; None if the loss has the scope of tokens.
    """

    output: Tensor
    weights: Tensor
    entropy: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Tensor | None = None

    @property
    def old_logp(self) -> Tensor:
        """Return the log-probabilities before the update, [R]; in the only update on a batch they are the output."""
        old = self.columns.get("old_logp")
        return self.output.detach() if old is None else old

    def per_sequence(self, per_token: Tensor) -> Tensor:
        """Sum over the trained tokens of each sequence, [R] -> [S]; differentiable, and always in the same order."""
        assert self.lengths is not None, "only a loss with the scope of sequences sees whole ones"
        return torch.segment_reduce(per_token, "sum", lengths=self.lengths, initial=0.0, unsafe=True)

    def mean_per_sequence(self, per_token: Tensor) -> Tensor:
        """Average over a sequence's tokens of weight other than 0, each counted once: [R] -> [S], 0 if there are none.

        Args:
            per_token: 0 where the weight is 0, as all that is computed from `weighted`.
        """
        counted = self.per_sequence((self.weights != 0).to(per_token.dtype))
        return self.per_sequence(per_token) / counted.clamp_min(1.0)

    def sequence_weights(self) -> Tensor:
        """Sum each sequence's weights: [S], the shares of whole sequences."""
        return self.per_sequence(self.weights)

    def pairs(self, per_sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Split values [S] into those of the chosen and those of the rejected responses, [S / 2] each."""
        return per_sequence[0::2], per_sequence[1::2]

    def weighted(self) -> LossInput:
        """Return the input with 0 in place of every value of weight 0."""
        kept = self.weights != 0

        def only_kept(x: Tensor) -> Tensor:
            return torch.where(kept, x, 0.0) if x.shape == kept.shape else x

        return replace(
            self,
            output=only_kept(self.output),
            entropy=None if self.entropy is None else only_kept(self.entropy),
            columns={name: only_kept(x) for name, x in self.columns.items()},
        )


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Holds a share of a mini-batch's loss.

    Attributes:
        loss: scalar to differentiate; the shares add up.
        metrics: by name, without the role's.
    """

    loss: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)


Loss = Callable[[LossInput], LossOutput]
"""May have these attributes:

columns: names of the fields of `Batch`, and of own columns (`Batch.with_columns`), that it reads; those that are filled
    are in `LossInput.columns`.
scope: a `Scope`; "token" by default.
prepare: (batch, sequences of the mini-batch) -> the batch with columns that depend on the whole mini-batch.
reports: true if it may have no gradient, since it is there for its metrics.
"""


def columns_of(loss: Loss) -> tuple[str, ...]:
    """List the columns of a batch that a loss reads."""
    return tuple(getattr(loss, "columns", ()))


def columns_for(
    loss: Loss, batch: Batch, per: Literal["token", "sequence"]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the columns that a loss reads: those with a value per token [T], and those with one per sequence [N].

    Args:
        per: what a model's head computes a number for. A loss that sees tokens has the values of their sequences there.

    Raises:
        ValueError: the loss names a column that batches do not have.
    """
    by_token, by_sequence = batch.columns(columns_of(loss))
    if per == "token" and scope_of(loss) == "token":
        return by_token | {name: batch.spread(column) for name, column in by_sequence.items()}, {}
    return by_token, by_sequence


def scope_of(loss: Loss) -> Scope:
    """Return the tokens that a loss must see at once."""
    scope: Scope = getattr(loss, "scope", "token")
    return scope


def prepared(loss: Loss, batch: Batch, sequences: Sequence[int]) -> Batch:
    """Add to a batch what the loss must know of a whole mini-batch, for which every rank gets all tokens."""
    if not _prepares(loss):
        return batch
    prepare = loss.prepare  # type: ignore[attr-defined]
    return changed_by(lambda whole: prepare(whole, sequences), batch, f"prepare of the loss {name_of(loss)}")


def _prepares(loss: Loss) -> bool:
    return any(map(_prepares, loss.parts)) if isinstance(loss, Sum) else hasattr(loss, "prepare")


def computed(loss: Loss, x: LossInput) -> LossOutput:
    """Call a loss.

    Raises:
        OwnCodeError: it returned something else than a loss that can be differentiated; names the loss.
    """
    with torch_as_before():
        out: Any = loss(x)
    right = isinstance(out, LossOutput) and isinstance(out.loss, Tensor) and out.loss.ndim == 0
    if not right or not isinstance(out.metrics, Mapping) or not all(map(_is_metric, out.metrics.values())):
        text = " ".join(f"{out!r}".split())[:200]
        raise OwnCodeError(
            f"the loss {name_of(loss)} must return a LossOutput of a scalar tensor and of Metrics, not {text}"
        )
    if out.loss.device != x.output.device:
        raise OwnCodeError(
            f"the loss {name_of(loss)} returned a loss on {out.loss.device}; compute it from x.output, on "
            f"{x.output.device}"
        )
    if x.output.requires_grad and not out.loss.requires_grad and not getattr(loss, "reports", False):
        raise OwnCodeError(
            f"the loss {name_of(loss)} returned a loss without gradient; compute it from x.output, without detach()"
        )
    return cast(LossOutput, out)


def _is_metric(metric: Any) -> bool:
    if not isinstance(metric, Metric) or metric.reduce not in get_args(Reduce):
        return False
    return isinstance(metric.value, Real) or (isinstance(metric.value, Tensor) and metric.value.ndim == 0)


class Sum:
    """Adds up several losses; of metrics with the same name it reports those of the last loss."""

    def __init__(self, *parts: Loss) -> None:
        self.parts = parts
        self.columns = tuple(dict.fromkeys(name for part in parts for name in columns_of(part)))
        scopes: tuple[Scope, ...] = ("pair", "sequence", "token")
        self.scope: Scope = next(scope for scope in scopes if scope in {scope_of(part) for part in parts})

    def prepare(self, batch: Batch, sequences: Sequence[int]) -> Batch:
        for part in self.parts:
            batch = prepared(part, batch, sequences)
        return batch

    def __call__(self, x: LossInput) -> LossOutput:
        outputs = [computed(part, x) for part in self.parts]
        metrics: dict[str, Metric] = {}
        for out in outputs:
            metrics |= out.metrics
        return LossOutput(loss=sum((out.loss for out in outputs[1:]), start=outputs[0].loss), metrics=metrics)

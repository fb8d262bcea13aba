"""What a loss is given, and what it gives back. Losses carry their denominator in the weights and know no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Reduce = Literal["sum", "max", "first"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number about an update, which its micro-batches and ranks contribute to.

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
    """What a model's head computed for some of the tokens, or sequences, of a mini-batch.

    Attributes:
        output: float32 [R], differentiable: log-probabilities in nats of a language model's head, values of a value
            head, scores (one per sequence) of a score head.
        weights: float32 [R], their shares of the mini-batch's loss: the global denominator is in them.
        entropy: float32 [R], differentiable, nats; of a language model's head alone.
        columns: float32 [R] each, the fields of `Batch` that the loss names.
    """

    output: Tensor
    weights: Tensor
    entropy: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def weighted(self) -> LossInput:
        """The same with 0 in place of every value of weight 0.

        A token is rejected because its values are extreme, and 0 x infinity is NaN, in the loss as in its gradient.
        """
        kept = self.weights != 0

        def only_kept(x: Tensor) -> Tensor:
            return torch.where(kept, x, 0.0)

        return replace(
            self,
            output=only_kept(self.output),
            entropy=None if self.entropy is None else only_kept(self.entropy),
            columns={name: only_kept(x) for name, x in self.columns.items()},
        )


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A share of a mini-batch's loss.

    Attributes:
        loss: scalar to differentiate; the shares add up.
        metrics: by name, without the role's.
    """

    loss: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)


Loss = Callable[[LossInput], LossOutput]
"""May have an attribute `columns`, the names of the per-token fields of `Batch` that it reads; those that a batch has
are in `LossInput.columns`."""


def columns_of(loss: Loss) -> tuple[str, ...]:
    """The fields of `Batch` that a loss reads."""
    return tuple(getattr(loss, "columns", ()))

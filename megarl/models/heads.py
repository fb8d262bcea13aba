"""What stands on a model's last stage: hidden states -> log-probabilities, values or scores, and their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from megarl.algorithms.loss import Loss, LossInput, LossOutput
from megarl.models.logprobs import VocabShard, token_log_probs, token_loss
from megarl.models.microbatch import MicroBatch


class Head(Protocol):
    """Turns the last stage's hidden states, [L, B, hidden], into one number per trained token or per sequence.

    The output weight is an argument: its owner knows when its values have arrived.
    """

    @property
    def per(self) -> Literal["token", "sequence"]: ...

    def outputs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> Tensor:
        """Without gradients: float32 [R], or [S]."""
        ...

    def loss(self, hidden: Tensor, weight: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, list[LossOutput]]:
        """The micro-batch's loss to differentiate, and its parts."""
        ...


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """Log-probabilities of the trained tokens at the batch's temperature, vocabulary split over the TP ranks.

    A loss is called for one chunk of the micro-batch after the other, so that logits never outlive a chunk.
    """

    per: ClassVar[Literal["token"]] = "token"
    shard: VocabShard

    def outputs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> Tensor:
        states = _states(hidden, micro.predictors)
        return token_log_probs(states, weight, micro.labels, self.shard, temperature=micro.temperature)[0]

    def loss(self, hidden: Tensor, weight: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, list[LossOutput]]:
        parts: list[LossOutput] = []

        def of_chunk(logp: Tensor, entropy: Tensor, part: slice) -> Tensor:
            values = {name: column[part] for name, column in micro.columns.items()}
            parts.append(loss(LossInput(output=logp, entropy=entropy, weights=values.pop("weights"), columns=values)))
            return parts[-1].loss

        states = _states(hidden, micro.predictors)
        total = token_loss(states, weight, micro.labels, self.shard, of_chunk, temperature=micro.temperature)
        return total, parts


@dataclass(frozen=True, kw_only=True)
class ScalarHead:
    """A linear layer with one output, in fp32.

    Attributes:
        per: `token` gives the value of the state before each trained token, `sequence` one score, read at the last
            token.
    """

    per: Literal["token", "sequence"]

    def outputs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> Tensor:
        states = _states(hidden, micro.predictors if self.per == "token" else micro.last)
        return torch.nn.functional.linear(states.float(), weight.float()).squeeze(-1)

    def loss(self, hidden: Tensor, weight: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, list[LossOutput]]:
        columns = dict(micro.columns)
        output, weights = self.outputs(hidden, weight, micro), columns.pop("weights")
        out = loss(LossInput(output=output, weights=weights, columns=columns))
        return out.loss, [out]


def _states(hidden: Tensor, positions: Tensor) -> Tensor:
    """[L, B, hidden] -> [R, hidden]; a position occurs once, so its gradient needs no sorting."""
    return hidden.flatten(0, 1).index_select(0, positions)

"""Computes log-probabilities, values or scores, and their losses, from the hidden states of a model's last stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from megarl.algorithms.loss import Loss, LossInput, LossOutput, computed, scope_of
from megarl.models.logprobs import VocabShard, token_log_probs, token_loss
from megarl.models.microbatch import MicroBatch, Repeated


class Head(Protocol):
    """Turns the last stage's hidden states, [L, B, hidden], into one number per trained token or per sequence.

    The output weight is an argument: its owner knows when its values have arrived.
    """

    @property
    def per(self) -> Literal["token", "sequence"]: ...

    def outputs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> Tensor:
        """Compute without gradients: float32 [R], or [S]."""
        ...

    def loss(self, hidden: Tensor, weight: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, Passed]:
        """Compute the micro-batch's loss to differentiate, and its results; among its columns are the `weights`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Holds the results of a micro-batch's pass.

    Attributes:
        losses: of one part of the micro-batch after the other; none of a pass without a loss, nor of one that another
            context-parallel rank reports.
        outputs: what the head computed, float32 [R] or [S].
        places: int64, where those belong in the batch: tokens or sequences; on the host.
    """

    losses: list[LossOutput]
    outputs: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """Computes log-probabilities of trained tokens at the batch's temperature, vocabulary split over the TP ranks.

    A loss with the scope of tokens is called for one chunk of the micro-batch after the other, while the chunk's logits
    are there. Any other sees all tokens of the micro-batch, and the logits are computed again in the backward pass.
    """

    per: ClassVar[Literal["token"]] = "token"
    shard: VocabShard

    def outputs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> Tensor:
        return self._log_probs(hidden, weight, micro)[0]

    def loss(self, hidden: Tensor, weight: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, Passed]:
        if scope_of(loss) != "token":
            logp, entropy = self._log_probs(hidden, weight, micro)
            return _whole(loss, micro, logp, self.per, entropy)
        losses: list[LossOutput] = []
        columns = micro.at_own_tokens()
        outputs = torch.empty(len(micro.labels), dtype=torch.float32, device=hidden.device)

        def of_chunk(logp: Tensor, entropy: Tensor, part: slice) -> Tensor:
            outputs[part] = logp.detach()
            values = {name: column[part] for name, column in columns.items()}
            x = LossInput(output=logp, entropy=entropy, weights=values.pop("weights"), columns=values)
            losses.append(computed(loss, x.weighted()))
            return losses[-1].loss

        states = _states(hidden, micro.predictors, micro.repeated)
        total = token_loss(states, weight, micro.labels, self.shard, of_chunk, temperature=micro.temperature)
        return total, Passed(losses=losses, outputs=outputs, places=micro.index)

    def _log_probs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        states = _states(hidden, micro.predictors, micro.repeated)
        return token_log_probs(states, weight, micro.labels, self.shard, temperature=micro.temperature)


@dataclass(frozen=True, kw_only=True)
class ScalarHead:
    """Computes a linear layer with one output, in fp32.

    Attributes:
        per: `token` gives the value of the state before each trained token, `sequence` one score, read at the last
            token.
    """

    per: Literal["token", "sequence"]

    def outputs(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> Tensor:
        positions, repeated = (micro.predictors, micro.repeated) if self.per == "token" else (micro.last, None)
        states = _states(hidden, positions, repeated)
        return torch.nn.functional.linear(states.float(), weight.float()).squeeze(-1)

    def loss(self, hidden: Tensor, weight: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, Passed]:
        return _whole(loss, micro, self.outputs(hidden, weight, micro), self.per)


def _whole(
    loss: Loss, micro: MicroBatch, output: Tensor, per: Literal["token", "sequence"], entropy: Tensor | None = None
) -> tuple[Tensor, Passed]:
    """Compute a loss that sees all of a micro-batch, also where context-parallel ranks have parts of it.

    These gather the outputs, a number each, and compute the same.
    """
    own, part, columns = output.detach(), micro.part, {**micro.columns, **micro.sequence_columns}
    weights = columns.pop("weights")
    if part is not None:
        where = part.tokens if per == "token" else part.sequences
        output = part.gathered(output, where, len(weights))
        entropy = None if entropy is None else part.gathered(entropy, where, len(weights))
    x = LossInput(output=output, entropy=entropy, weights=weights, columns=columns, lengths=micro.trained)
    out = computed(loss, x.weighted())
    reported = [out] if part is None or part.is_first else []
    places = micro.index if per == "token" else micro.sequences
    # a copy: Megatron-Core takes the memory of what a pipeline stage returns
    return out.loss.clone(), Passed(losses=reported, outputs=own, places=places)


def _states(hidden: Tensor, positions: Tensor, repeated: Repeated | None) -> Tensor:
    """Select: [L, B, hidden] -> [R, hidden]. The gradients of a row that is selected several times are added up in
    float32."""
    flat = hidden.flatten(0, 1)
    states = flat.index_select(0, positions)
    if repeated is None:
        return states
    again = flat.index_select(0, repeated.rows).float().index_select(0, repeated.numbers)
    return states.index_copy(0, repeated.places, again.to(flat.dtype))

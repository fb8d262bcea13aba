"""How a batch is cut: mini-batches for the optimizer, micro-batches for this rank's forward passes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Config
from megarl.config.policy import Batching
from megarl.data.packing import MicroBatches, MiniBatch, pack_by_count, pack_by_tokens
from megarl.parallel.groups import Groups
from megarl.types import Batch


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One plan serves log-probabilities and training, so that the first ratio is exactly 1."""

    mini_batches: list[MiniBatch]

    @property
    def micro_batches(self) -> MicroBatches:
        """This rank's micro-batches of the whole step."""
        return [micro for mini_batch in self.mini_batches for micro in mini_batch.micro_batches]


def plan_micro_batches(
    batch: Batch,
    config: Config,
    groups: Groups,
    *,
    sequences: int | None = None,
    batching: Batching | None = None,
    together: int = 1,
) -> StepPlan:
    """How a batch goes through a model.

    Args:
        groups: of the model's layout.
        sequences: per mini-batch; None: all of them in one.
        batching: of the model; default: the actor's.
        together: neighbours that stay together: 2 for pairs.
    """
    batching, layout = batching or config.actor_rollout_ref.actor, groups.train
    size = sequences or max(1, len(batch))
    mini_batches = [range(i, min(i + size, len(batch))) for i in range(0, len(batch), size)]
    lengths = batch.lengths.tolist()
    balance = config.trainer.balance_batch
    multiple_of = layout.pp if layout.chunks > 1 else 1  # the interleaved schedule works in rounds of pp
    if batching.use_dynamic_bsz:
        limit = batching.ppo_max_token_len_per_gpu
        plan = pack_by_tokens(
            lengths,
            mini_batches,
            dp=layout.dp,
            max_tokens=limit,
            multiple_of=multiple_of,
            balance=balance,
            together=together,
        )
    else:
        count = batching.ppo_micro_batch_size_per_gpu
        plan = pack_by_count(
            lengths,
            mini_batches,
            dp=layout.dp,
            micro_batch_size=count,
            multiple_of=multiple_of,
            balance=balance,
            together=together,
        )
    mine = plan[layout.coords(groups.rank).dp]
    return StepPlan(
        mini_batches=[MiniBatch(sequences=s, micro_batches=m) for s, m in zip(mini_batches, mine, strict=True)]
    )

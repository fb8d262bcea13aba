"""Cuts a batch into mini-batches for the optimizer, and micro-batches for this rank's forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch

from megarl.config.policy import BatchingConfig
from megarl.data.packing import MicroBatches, Plan, SharedPrompts, pack_by_count, pack_by_tokens
from megarl.parallel.layout import TrainLayout
from megarl.parallel.world import World
from megarl.types import Batch
from megarl.types.owners import Owners


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Holds this rank's share of a batch's sequences, for models of one training layout.

    In another layout other ranks are data-parallel: sequences would be passed twice, and their results added up.

    Attributes:
        owners: the ranks that pass each sequence, of the whole batch; None: a batch of which every rank has all tokens.
    """

    layout: TrainLayout
    micro_batches: MicroBatches
    owners: Owners | None = None


@dataclass(frozen=True, kw_only=True)
class MiniBatch(Passes):
    """Holds one optimizer step.

    Attributes:
        sequences: indices of its sequences, over all data-parallel ranks.
    """

    sequences: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class StepPlan(Passes):
    """Holds a whole batch. One plan serves log-probabilities and training, so that the first ratio is exactly 1.

    Attributes:
        mini_batches: the optimizer steps; `micro_batches` are all of theirs, in order.
        saved: tokens of prompts that are not computed again, on all ranks, and the sum of squares of their numbers;
            None: no sequences share a prompt.
    """

    mini_batches: list[MiniBatch]
    owners: Owners = field()
    saved: tuple[int, int] | None = None


def plan_passes(
    batch: Batch,
    layout: TrainLayout,
    world: World,
    *,
    batching: BatchingConfig,
    balance: bool,
    sequences: int | None = None,
    together: int = 1,
    share_prompts: bool = False,
) -> StepPlan:
    """Cut a batch for this rank; every rank calls it. The arguments are those of `MegatronModel` and its `plan`."""
    size = sequences or max(1, len(batch))
    parts = [range(i, min(i + size, len(batch))) for i in range(0, len(batch), size)]
    lengths = batch.lengths.tolist()
    multiple_of = layout.pp if layout.chunks > 1 else 1  # the interleaved schedule works in rounds of pp
    how: Any = dict(dp=layout.dp, multiple_of=multiple_of, balance=balance, together=together)
    prompts = prompts_of(batch) if share_prompts else None
    if batching.use_dynamic_bsz:
        most = layout.micro_batch_tokens(batching.ppo_max_token_len_per_gpu)
        plan = pack_by_tokens(lengths, parts, max_tokens=most, prompts=prompts, **how)
    else:
        plan = pack_by_count(lengths, parts, micro_batch_size=batching.ppo_micro_batch_size_per_gpu, **how)
    block_of = torch.full((len(batch),), -1)
    for dp, of_rank in enumerate(plan):
        block_of[[i for micro_batches in of_rank for micro in micro_batches for i in micro]] = dp
    owners = Owners(block_of=block_of, blocks=layout.data_blocks, ranks=world)
    mini_batches = [
        MiniBatch(layout=layout, sequences=part, micro_batches=micro_batches, owners=owners)
        for part, micro_batches in zip(parts, plan[layout.coords(world.rank).dp], strict=True)
    ]
    return StepPlan(
        layout=layout,
        mini_batches=mini_batches,
        micro_batches=[micro for mini_batch in mini_batches for micro in mini_batch.micro_batches],
        owners=owners,
        saved=_saved(plan, prompts),
    )


def prompts_of(batch: Batch) -> SharedPrompts:
    """Compare the prompts of a batch, each up to the first trained token, by a checksum; every rank calls it.

    Prompts of which other experts were recorded are others.
    """
    prompts = [batch.prompt(i) for i in batch.own.tolist()]
    checksums = [crc32(b"".join(x.numpy().tobytes() for x in prompt)) for prompt in prompts]
    numbers, tokens = (
        batch.of_all(torch.tensor(values, dtype=torch.int64)).tolist()
        for values in (checksums, [len(prompt[0]) for prompt in prompts])
    )
    return SharedPrompts(numbers=numbers, tokens=tokens)


def _saved(plan: Plan, prompts: SharedPrompts | None) -> tuple[int, int] | None:
    if prompts is None:
        return None
    of_micro = [prompts.saved(micro) for rank in plan for mini_batch in rank for micro in mini_batch]
    return sum(tokens for tokens, _ in of_micro), sum(squares for _, squares in of_micro)

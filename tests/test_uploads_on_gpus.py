"""What of a step's tokens is on the GPU: those of the micro-batches that run, however long the step is."""

from __future__ import annotations

import gc

import pytest
import torch
from ranks import Ranks
from training_cases import Case, actor_in

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH, TRAINED = 20, 4
"""Tokens per sequence; sequences of the micro-batch."""


def peak_of(sequences: int) -> int:
    """Bytes that log-probabilities and an update of one small micro-batch take at most, in a step of so many."""
    from megarl.algorithms.losses.vanilla import PolicyClip
    from megarl.roles.passes import MiniBatch
    from megarl.types import Batch

    tokens = torch.full((sequences * LENGTH,), 3)
    response = (torch.arange(LENGTH) > 9).repeat(sequences)
    starts = torch.arange(0, sequences * LENGTH + 1, LENGTH)
    batch = Batch(tokens=tokens, cu_seqlens=starts, response_mask=response, groups=torch.zeros(sequences).long())
    chosen = [list(range(TRAINED))]
    with actor_in(Case()) as actor:
        mini_batch = MiniBatch(layout=actor.groups.layout, sequences=chosen[0], micro_batches=chosen)
        weights = torch.where(torch.arange(len(tokens)) < TRAINED * LENGTH, 0.1, 0.0) * response
        for _ in range(2):  # the first update makes Adam's moments
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            old = actor.log_probs(batch, mini_batch)
            batch = batch.with_(old_logp=old, ref_logp=old, advantages=torch.ones(len(tokens)))
            actor.update(batch, mini_batch, PolicyClip(clip_low=0.2, clip_high=0.2), weights)
        return torch.cuda.max_memory_allocated() - before


def test_a_longer_step_takes_no_more_memory(ranks: Ranks) -> None:
    """20 million tokens, of which 80 are used: each column of them would be 80 MB."""
    (small,) = ranks.run(1, peak_of, TRAINED)
    (large,) = ranks.run(1, peak_of, 1_000_000)
    assert large < small + 2**20

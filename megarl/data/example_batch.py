"""Joins examples into batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data.examples import Example
from megarl.types import Batch, batch_of


def batch_of_examples(examples: Sequence[Example]) -> Batch:
    """Join the sequences of examples; `groups` says which example a sequence is of, `labels` repeats its label."""
    sequences = [sequence for example in examples for sequence in example.sequences]
    turns = [turn for sequence in sequences for turn in sequence]
    pairs = batch_of(turns[::2], turns[1::2], range(len(turns) // 2))  # a turn that is read, and one that is learnt
    pairs_before = torch.tensor([0, *(len(sequence) // 2 for sequence in sequences)]).cumsum(0)
    groups = torch.tensor([i for i, example in enumerate(examples) for _ in example.sequences], dtype=torch.int64)
    labels = torch.tensor([example.label for example in examples], dtype=torch.float32)
    return pairs.with_(cu_seqlens=pairs.cu_seqlens[pairs_before], groups=groups, labels=labels[groups])


def mismatched(batch: Batch) -> Batch:
    """Put each answer behind the next sequence's prompt, the last behind the first prompt: pairs that no row has.

    Args:
        batch: sequences of a prompt and its answer.
    """
    parts = list(zip(*(x.split(batch.lengths.tolist()) for x in (batch.tokens, batch.response_mask)), strict=True))
    prompts = [tokens[~learnt].numpy() for tokens, learnt in parts]
    answers = [tokens[learnt].numpy() for tokens, learnt in parts]
    return batch_of([*prompts[1:], prompts[0]], answers, batch.groups.tolist())

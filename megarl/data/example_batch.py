"""Joins examples into batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data.examples import Example, Turns
from megarl.types import Batch, batch_of


def batch_of_examples(examples: Sequence[Example]) -> Batch:
    """Join the sequences of examples; `groups` says which example a sequence is of, `labels` repeats its label."""
    turns = [sequence for example in examples for sequence in example.sequences]
    groups = [i for i, example in enumerate(examples) for _ in example.sequences]
    batch = batch_of([_joined(t) for t in turns], [()] * len(turns), groups)
    learnt = [torch.tensor([i % 2 == 1 for i, turn in enumerate(t) for _ in turn]) for t in turns]
    labels = torch.tensor([example.label for example in examples], dtype=torch.float32)
    return batch.with_(response_mask=torch.cat(learnt), labels=labels[batch.groups])


def mismatched(batch: Batch) -> Batch:
    """Put each answer behind the next sequence's prompt, the last behind the first's: nobody gave it to that one.

    Args:
        batch: sequences of a prompt and its answer.
    """
    parts = list(zip(*(x.split(batch.lengths.tolist()) for x in (batch.tokens, batch.response_mask)), strict=True))
    prompts = [tokens[~learnt].tolist() for tokens, learnt in parts]
    answers = [tokens[learnt].tolist() for tokens, learnt in parts]
    return batch_of([*prompts[1:], prompts[0]], answers, batch.groups.tolist())


def _joined(turns: Turns) -> tuple[int, ...]:
    return tuple(token for turn in turns for token in turn)

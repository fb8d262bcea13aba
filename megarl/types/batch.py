"""The tensors of a step, jagged instead of padded. They are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PER_SEQUENCE = frozenset(
    {"groups", "episodes", "rewards", "greedy_rewards", "truncated", "labels", "reference_point", "kl_in_reward"}
)
"""The fields of `Batch` with one value per sequence."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences (prompt + response) of one step, the same on every rank.

    Every rank holds the token ids and per-token scalars of a step (some 33 bytes a token), so everything that is
    computed from them (advantages, denominators, packing) is the same everywhere without communication. N
    sequences, T tokens in all; per-token tensors are aligned with `tokens`, so that `old_logp[t]` belongs to token t,
    and are 0 at prompt tokens.

    Attributes:
        tokens: int64 [T], sequences one after another.
        cu_seqlens: int64 [N + 1], sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]].
        response_mask: bool [T], the tokens that are trained on.
        groups: int64 [N], which prompt a sequence belongs to.
        episodes: int64 [N], which response a sequence is a part of; None: each is a response of its own.
        rewards: float32 [N], one score per sequence, the same for all parts of a response.
        token_rewards: float32 [T], the score at the last trained token, less the KL at each if that is in the reward.
        greedy_rewards: float32 [N], the score of the greedy response to the same prompt.
        staleness: int64 [T], by how many versions the weights that drew a token are older than the newest ones; None:
            by none.
        truncated: bool [N], whether the response was cut off at its greatest length.
        labels: float32 [N], what a data set says of a sequence: the margin of its pair, or 1 for desirable and 0 for
            not.
        reference_point: float32 [N], KL to the reference that KTO measures answers from; nats, the same for all.
        rollout_logp: float32 [T], as the generation engine recorded it.
        importance: float32 [T], importance weights of the tokens, 0 for rejected ones; None: all 1.
        old_logp: float32 [T], by the training layout before the first update.
        ref_logp: float32 [T], by the reference model.
        teacher_logp: float32 [T], by the teacher.
        values: float32 [T], of the critic, for the state before each trained token.
        returns: float32 [T], what the critic learns to predict.
        kl_in_reward: float32 [N], KL to the reference per sequence, when the reward contains it; nats.
        advantages: float32 [T].
        selected: float32 [T], 1 at the tokens that a loss has chosen among those of its mini-batch, 0 elsewhere.
        temperature: that the responses were sampled at; log-probabilities are those of the distribution at it.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    response_mask: Tensor
    groups: Tensor
    episodes: Tensor | None = None
    rewards: Tensor | None = None
    token_rewards: Tensor | None = None
    greedy_rewards: Tensor | None = None
    staleness: Tensor | None = None
    truncated: Tensor | None = None
    labels: Tensor | None = None
    reference_point: Tensor | None = None
    rollout_logp: Tensor | None = None
    importance: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    kl_in_reward: Tensor | None = None
    advantages: Tensor | None = None
    selected: Tensor | None = None
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [N], tokens per sequence."""
        return self.cu_seqlens.diff()

    @property
    def sequence_of_token(self) -> Tensor:
        """int64 [T], which sequence a token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        """int64 [N], trained tokens per sequence."""
        return self.sum_per_sequence(self.response_mask.long())

    @property
    def last_trained(self) -> Tensor:
        """int64 [N], the place of each sequence's last trained token; -1 where there is none."""
        places = torch.where(self.response_mask, torch.arange(len(self.tokens)), -1)
        last = torch.full((len(self),), -1)
        return last.scatter_reduce_(0, self.sequence_of_token, places, "amax")

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        """[T] -> [N]."""
        out = torch.zeros(len(self), dtype=per_token.dtype)
        return out.index_add_(0, self.sequence_of_token, per_token)

    def with_(self, **fields: Any) -> Batch:
        """A copy with some fields set."""
        return replace(self, **fields)


def batch_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], groups: Sequence[int]) -> Batch:
    """Concatenate prompt and response token ids into a `Batch`; every response token is trained on."""
    parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return Batch(
        tokens=torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])),
        cu_seqlens=torch.cat((sizes.new_zeros(1), sizes.view(-1, 2).sum(1).cumsum(0))),
        response_mask=torch.tensor([False, True]).repeat(len(parts) // 2).repeat_interleave(sizes),
        groups=torch.tensor(groups, dtype=torch.int64),
    )

"""The values that travel between packages: prompts, completions, batches. Jagged, not padded; frozen."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data.

    Attributes:
        index: position of the row in its file list; stable over epochs and restarts.
        token_ids: the tokenised prompt.
        row: every column of the row as read, for the reward function.
        source: file and line of the row, "train.jsonl:17", for messages.
        data_source: what `data.source_key` says it is from, or else the file's name without its ending.
    """

    index: int
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]
    source: str = ""
    data_source: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` -1 keeps the whole vocabulary.

    Attributes:
        max_tokens: response tokens at most, the stop token included.
        stop_token_ids: a response ends with (and includes) the first of these.
        stop: a response ends with the token that completes one of these strings in its text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A generated response, in arrays: a step may have 10^8 tokens.

    Attributes:
        token_ids: int32 ("i"), response tokens, the stop token included when there is one.
        logp: float32 ("f"), log-probability of each token under the distribution it was drawn from (temperature and
            filters applied), nats. Greedy: the distribution at temperature 1, unfiltered.
        finish_reason: "stop" after a stop token or string, "length" after `max_tokens`.
    """

    token_ids: array[int]
    logp: array[float]
    finish_reason: Literal["stop", "length"]


PER_SEQUENCE = frozenset(
    {"groups", "rewards", "greedy_rewards", "truncated", "labels", "reference_point", "kl_in_reward"}
)
"""The fields of `Batch` with one value per sequence."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences (prompt + response) of one step, the same on every rank.

    Token ids and per-token scalars of a step are a few megabytes, so every rank holds them all, and everything that
    is computed from them (advantages, denominators, packing) is the same everywhere without communication. N
    sequences, T tokens in all; per-token tensors are aligned with `tokens`, so that `old_logp[t]` belongs to token t,
    and are 0 at prompt tokens.

    Attributes:
        tokens: int64 [T], sequences one after another.
        cu_seqlens: int64 [N + 1], sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]].
        response_mask: bool [T], the tokens that are trained on.
        groups: int64 [N], which prompt a sequence belongs to.
        rewards: float32 [N], one score per sequence.
        token_rewards: float32 [T], the score at the last trained token, less the KL at each if that is in the reward.
        greedy_rewards: float32 [N], the score of the greedy response to the same prompt.
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
    rewards: Tensor | None = None
    token_rewards: Tensor | None = None
    greedy_rewards: Tensor | None = None
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


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the generation phase returned, in the order of (prompt, sample), the same on every rank.

    Attributes:
        prompts: one per prompt, not repeated.
        n: samples per prompt.
        completions: n per prompt: sample j of prompt i is completions[i * n + j].
        temperature: that they were sampled at; 1 for greedy ones, whose log-probabilities are those at 1.
        rewards: one score per completion once scored; None where scoring failed.
    """

    prompts: Sequence[Prompt]
    n: int
    completions: Sequence[Completion]
    temperature: float = 1.0
    rewards: Sequence[float | None] = field(default=())

    def of_prompts(self, which: Sequence[int]) -> Rollouts:
        """Those of some prompts, by place, with all their samples."""
        samples = [i * self.n + j for i in which for j in range(self.n)]
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in which),
            completions=tuple(self.completions[i] for i in samples),
            rewards=tuple(self.rewards[i] for i in samples) if self.rewards else (),
        )

    @staticmethod
    def joined(parts: Sequence[Rollouts]) -> Rollouts:
        """One after the other; of equal n and temperature."""
        return replace(
            parts[0],
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            completions=tuple(completion for part in parts for completion in part.completions),
            rewards=tuple(reward for part in parts for reward in part.rewards),
        )

    def prompt_of(self, sample: int) -> Prompt:
        return self.prompts[sample // self.n]

    def to_batch(self) -> Batch:
        """Concatenate into a `Batch` with `rollout_logp` and, once scored, `rewards`.

        A completion without a score takes no part: none of its tokens is trained on, and its reward reads 0.
        """
        prompts = [self.prompt_of(i).token_ids for i in range(len(self.completions))]
        batch = batch_of(
            prompts, [c.token_ids for c in self.completions], [i // self.n for i in range(len(self.completions))]
        )
        logp = torch.zeros(len(batch.tokens))
        logp[batch.response_mask] = torch.from_numpy(np.concatenate([np.asarray(c.logp) for c in self.completions]))
        truncated = torch.tensor([c.finish_reason == "length" for c in self.completions])
        batch = batch.with_(rollout_logp=logp, truncated=truncated, temperature=self.temperature)
        if not self.rewards:
            return batch
        scored = torch.tensor([reward is not None for reward in self.rewards])
        return batch.with_(
            rewards=torch.tensor([reward or 0.0 for reward in self.rewards], dtype=torch.float32),
            response_mask=batch.response_mask & scored[batch.sequence_of_token],
        )

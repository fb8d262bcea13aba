"""Holds the tensors of a step, jagged instead of padded, in frozen classes.

`SequenceTable` holds the columns of sequences, which every rank has; `TokenShard` those of tokens, of which a rank may
have a part; and a `Batch` is both. Packing needs the table alone. What is computed of tokens, and what of sequences, go
into each other by the methods of `Batch`, so that the same code serves a part and all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megarl.types.owners import Owners, moved, starts_of


@dataclass(frozen=True, kw_only=True)
class SequenceTable:
    """Holds columns with one value for each of a step's N sequences; some 40 bytes a sequence.

    Attributes:
        cu_seqlens: int64 [N + 1], where each sequence begins among the tokens of all, and the end of the last. A rank
            that has all tokens has sequence i at tokens[cu_seqlens[i]:cu_seqlens[i + 1]]; see `Batch.starts`.
        groups: int64 [N], which prompt a sequence belongs to.
        episodes: int64 [N], which response a sequence is a part of; None: each is a response of its own.
        rewards: float32 [N], one score per sequence, the same for all parts of a response.
        greedy_rewards: float32 [N], the score of the greedy response to the same prompt.
        truncated: bool [N], whether the response was cut off at its greatest length.
        labels: float32 [N], from the data set: the margin of the sequence's pair, or 1 for desirable and 0 for not.
        reference_point: float32 [N], KL to the reference that KTO measures answers from; nats, the same for all.
        kl_in_reward: float32 [N], KL to the reference per sequence, when the reward contains it; nats.
        sequence_columns: [N] each, a flow's or an estimator's own columns by name.
    """

    cu_seqlens: Tensor
    groups: Tensor
    episodes: Tensor | None = None
    rewards: Tensor | None = None
    greedy_rewards: Tensor | None = None
    truncated: Tensor | None = None
    labels: Tensor | None = None
    reference_point: Tensor | None = None
    kl_in_reward: Tensor | None = None
    sequence_columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """Count the tokens of each sequence: int64 [N]."""
        return self.cu_seqlens.diff()


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """Holds columns with one value for each of T tokens, those that this rank has; some 40 bytes a token.

    Recorded experts are more: a byte or two for each layer and choice.

    The columns are aligned with `tokens`: `old_logp[t]` belongs to token t. They are 0 at prompt tokens.

    Attributes:
        tokens: int64 [T], sequences one after another.
        response_mask: bool [T], the tokens that are trained on.
        token_rewards: float32 [T], the score at the last trained token, less the KL at each if it is in the reward.
        staleness: int64 [T], by how many versions the weights that drew a token are older than the newest; None: 0
            everywhere.
        rollout_logp: float32 [T], as the generation engine recorded it.
        importance: float32 [T], importance weights of the tokens, 0 for rejected ones; None: all 1.
        old_logp: float32 [T], by the training layout before the first update.
        ref_logp: float32 [T], by the reference model.
        teacher_logp: float32 [T], by the teacher.
        values: float32 [T], of the critic, for the state before each trained token.
        returns: float32 [T], what the critic learns to predict.
        advantages: float32 [T].
        routed_experts: uint8 or int16 [T, layers with experts, experts per token], as the generation engine chose them;
            None: it recorded none.
        routed: bool [T], the tokens whose experts were recorded: not the last of a response, which it never fed to the
            model.
        selected: float32 [T], 1 at the tokens that a loss has chosen among those of its mini-batch, 0 elsewhere.
        token_columns: [T] each, a flow's or an estimator's own columns by name.
    """

    tokens: Tensor
    response_mask: Tensor
    token_rewards: Tensor | None = None
    staleness: Tensor | None = None
    rollout_logp: Tensor | None = None
    importance: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    advantages: Tensor | None = None
    routed_experts: Tensor | None = None
    routed: Tensor | None = None
    selected: Tensor | None = None
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Batch(SequenceTable, TokenShard):
    """Holds the sequences (prompt + response) of a step: a `SequenceTable` and a `TokenShard`.

    R of a rank's T tokens are trained on.

    Attributes:
        temperature: at which the responses were sampled; log-probabilities are those of the distribution at it.
        owners: the ranks that have the tokens; None: every rank has all.
    """

    temperature: float = 1.0
    owners: Owners | None = None

    @cached_property
    def own(self) -> Tensor:
        """List the sequences whose tokens this rank has: int64 [M], ascending."""
        return torch.arange(len(self)) if self.owners is None else self.owners.own

    @cached_property
    def starts(self) -> Tensor:
        """Place the first token of each sequence among this rank's: int64 [N], -1 where another rank has it."""
        return self.cu_seqlens[:-1] if self.owners is None else starts_of(self.own, self.lengths)

    @property
    def sequence_of_token(self) -> Tensor:
        """Number the sequence of each token: int64 [T]."""
        return torch.repeat_interleave(self.own, self.lengths[self.own])

    @cached_property
    def response_lengths(self) -> Tensor:
        """Count the trained tokens of each sequence: int64 [N]."""
        return self.sum_per_sequence(self.response_mask.long())

    @property
    def own_response_lengths(self) -> Tensor:
        """Count the trained tokens of each sequence whose tokens this rank has: int64 [M]; they add up to R."""
        return self.response_lengths[self.own]

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        """Sum over the tokens of each sequence: [T] -> [N], the same on every rank; every rank calls it."""
        dtype = torch.float32 if per_token.dtype == torch.float32 else torch.float64
        sums = reduced(per_token, self.lengths[self.own], "sum", dtype=dtype)
        return self.of_all(sums.to(per_token.dtype))

    def of_all(self, own: Tensor) -> Tensor:
        """Gather what was computed of each sequence whose tokens this rank has: [M] -> [N]; every rank calls it."""
        every = torch.zeros(len(self), dtype=own.dtype).index_copy_(0, self.own, own)
        return every if self.owners is None else self.owners.sum_(every)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Copy each sequence's value to all of its tokens: [N] -> [T]."""
        return per_sequence[self.own].repeat_interleave(self.lengths[self.own])

    def trained(self, per_token: Tensor) -> Tensor:
        """Pick the values at the trained tokens, sequence after sequence: [T] -> [R]."""
        return per_token[self.response_mask]

    def held_by(self, owners: Owners, columns: Collection[str] = ()) -> Batch:
        """Give each rank the tokens that it is to have; every rank calls it.

        Args:
            columns: of tokens, which are to be there then; others may be left out. Default: all that are filled.
        """
        had = self.owners or Owners.everywhere(len(self), owners.ranks)
        if had.matches(owners):
            return self if self.owners is not None else self.with_(owners=owners)
        of_shard = {f.name: None for f in fields(TokenShard) if f.name != "token_columns"}
        held = {**{name: getattr(self, name) for name in of_shard}, **self.token_columns}
        sent = {name: x for name, x in held.items() if x is not None and (not columns or name in columns)}
        received = moved(sent, self.lengths, had, owners)
        added = {name: received.pop(name) for name in self.token_columns.keys() & received.keys()}
        batch = self.with_(**of_shard | received, token_columns=added, owners=owners)
        if "response_lengths" in vars(self):
            vars(batch)["response_lengths"] = self.response_lengths
        return batch

    def everywhere(self, columns: Collection[str] = ()) -> Batch:
        """Give every rank all tokens; every rank calls it. For `columns` see `held_by`."""
        if self.owners is None:
            return self
        return self.held_by(Owners.everywhere(len(self), self.owners.ranks), columns).with_(owners=None)

    def changed_as_a_whole(self, change: Callable[[Batch], Batch]) -> Batch:
        """Change the batch by a function for which every rank needs all tokens, but not their experts; every rank calls
        it."""
        if self.owners is None:
            return change(self)
        names = {f.name for f in fields(TokenShard)} | self.token_columns.keys()
        whole = change(self.everywhere(names - {"routed_experts", "routed"}))
        return whole.held_by(self.owners).with_(routed_experts=self.routed_experts, routed=self.routed)

    def prompt(self, sequence: int) -> list[Tensor]:
        """Take what a model reads of a sequence before the first trained token: tokens, and their recorded experts.

        They are empty if the sequence, which this rank has, is not trained.
        """
        start, length = int(self.starts[sequence]), int(self.lengths[sequence])
        trained = self.response_mask[start : start + length].nonzero()
        end = start + int(trained[0]) if len(trained) else start
        return [x[start:end] for x in (self.tokens, self.routed, self.routed_experts) if x is not None]

    def at_trained(self, x: Tensor) -> Tensor:
        """Put values at the trained tokens, and 0 at the others: [R] -> float32 [T]."""
        return torch.zeros(len(self.tokens)).masked_scatter_(self.response_mask, x.float())

    def with_(self, **values: Any) -> Batch:
        """Copy the batch with some of its fields set."""
        batch = replace(self, **values)
        if not values.keys() & {"cu_seqlens", "response_mask", "owners"}:  # what comes of these alone is computed once
            computed = vars(self).keys() & {"own", "starts", "response_lengths"}
            vars(batch).update({name: vars(self)[name] for name in computed})
        return batch

    def with_columns(self, **columns: Tensor) -> Batch:
        """Copy the batch with columns of your own, which travel with it to every loss that names them in `columns`.

        Args:
            columns: float32, one value per sequence [N] or per token [T].

        Raises:
            ValueError: a batch has a field of that name, or the column has another length.
        """
        shapes = [(len(self),), self.tokens.shape]
        for name, column in columns.items():
            if name in {f.name for f in fields(self)}:
                raise ValueError(f"batch.with_columns: {name!r} is a field of every batch; use batch.with_({name}=...)")
            if column.shape not in shapes:
                raise ValueError(
                    f"batch.with_columns: {name!r} has the shape {list(column.shape)}; give it one value per sequence, "
                    f"[{len(self)}], or one per token, [{len(self.tokens)}]"
                )
        are_of_tokens = torch.tensor([int(column.shape != shapes[0]) for column in columns.values()])
        if self.owners is not None:  # a rank may have as many tokens as there are sequences: others know better
            are_of_tokens = self.owners.ranks.sum_(are_of_tokens, "columns of a batch")
        of_tokens = {name for name, yes in zip(columns, are_of_tokens.tolist(), strict=True) if yes}
        added = {**self.sequence_columns, **self.token_columns, **columns}
        of_tokens |= self.token_columns.keys() - columns.keys()
        return self.with_(
            sequence_columns={name: column for name, column in added.items() if name not in of_tokens},
            token_columns={name: column for name, column in added.items() if name in of_tokens},
        )

    def column(self, name: str) -> Tensor | None:
        """Look up a field, or a column of `with_columns`, by its name; None: the field is not filled.

        Raises:
            ValueError: the batch has neither.
        """
        added = {**self.sequence_columns, **self.token_columns}
        if name not in added and name not in {f.name for f in fields(self)}:
            raise ValueError(f"the batch has no column {name!r}; add it with batch.with_columns({name}=...)")
        column: Tensor | None = added[name] if name in added else getattr(self, name)
        return column

    def columns(self, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Look up the filled columns of these names: those of tokens [T], and those of sequences [N].

        Raises:
            ValueError: as `column`.
        """
        filled = {name: column for name in names if (column := self.column(name)) is not None}
        of_sequences = {f.name for f in fields(SequenceTable)} | self.sequence_columns.keys()
        by_token = {name: column for name, column in filled.items() if name not in of_sequences}
        return by_token, {name: column for name, column in filled.items() if name in of_sequences}


def reduced(x: Tensor, lengths: Tensor, kind: Literal["sum", "min", "max"], *, dtype: torch.dtype) -> Tensor:
    """Reduce values over sequences of these lengths, one after the other: [T] -> [M].

    Sums are 0 where there is nothing; least and largest are then infinite.

    Args:
        dtype: float32 or float64, in which it computes.
    """
    parts, counts = [torch.empty(0, dtype=dtype)], lengths.split(max(1, _AT_ONCE * len(lengths) // max(1, len(x))))
    for part, of_part in zip(x.split([int(of_part.sum()) for of_part in counts]), counts, strict=True):
        if len(of_part):
            parts.append(torch.segment_reduce(part.to(dtype), kind, lengths=of_part, unsafe=True))
    return torch.cat(parts)


_AT_ONCE = 1 << 22
"""Values that are converted at once, about."""


def batch_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], groups: Sequence[int]) -> Batch:
    """Concatenate prompt and response token ids into a `Batch`; every response token is trained on."""
    parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return Batch(
        tokens=torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in [(), *parts]])),
        cu_seqlens=torch.cat((sizes.new_zeros(1), sizes.view(-1, 2).sum(1).cumsum(0))),
        response_mask=torch.tensor([False, True]).repeat(len(parts) // 2).repeat_interleave(sizes),
        groups=torch.tensor(groups, dtype=torch.int64),
    )

"""The rollouts of a step that a person can look at, with what is known of their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch

from megarl.data.pieces import Pieces
from megarl.telemetry.samples import Sample, TokenColumns, chosen
from megarl.types import Batch, Rollout, Rollouts


class ShownRollouts:
    """Some of a step's rollouts.

    Attributes:
        step: whose they are.
    """

    def __init__(self, step: int, rollouts: Rollouts, wanted: int, pieces: Pieces) -> None:
        """
        Args:
            wanted: how many; -1: all.
        """
        self.step, self._pieces, self._tokenizer = step, pieces, pieces.tokenizer
        self._chosen = [(i, rollouts[i]) for i in chosen(rollouts.groups, wanted)]

    def samples(self, batch: Batch | None = None) -> list[Sample]:
        """As text.

        Args:
            batch: which was made of the rollouts: then with the columns of their tokens.
        """
        if batch is None:
            return self._texts
        return [
            sample.with_tokens(self._tokens(place, rollout, batch))
            for sample, (place, rollout) in zip(self._texts, self._chosen, strict=True)
        ]

    @cached_property
    def _texts(self) -> list[Sample]:
        asked = {
            rollout.prompt.token_ids for _, rollout in self._chosen
        }  # not the row's where a conversation began anew
        prompts = {token_ids: self._tokenizer.decode(token_ids) for token_ids in asked}
        return [self._sample(rollout, prompts[rollout.prompt.token_ids]) for _, rollout in self._chosen]

    def _sample(self, rollout: Rollout, prompt: str) -> Sample:
        decode, turns, turn_lengths, error = self._tokenizer.decode, None, None, None
        if rollout.episode is not None:
            said = rollout.turns
            turns = tuple(("policy" if own else "environment", decode(token_ids)) for own, token_ids in said)
            turn_lengths, error = tuple(len(token_ids) for _, token_ids in said), rollout.episode.error
        return Sample(
            prompt=prompt,
            response=decode(rollout.token_ids),
            answer=str(rollout.prompt.row.get("answer", "")),
            reward=rollout.reward,
            turns=turns,
            error=error,
            index=rollout.prompt.index,
            group=rollout.group,
            sample=rollout.sample,
            source=rollout.prompt.data_source,
            finish=rollout.finish_reason,
            length=len(rollout.token_ids),
            turn_lengths=turn_lengths,
            parts=_finite(rollout.parts) or None,
        )

    def _tokens(self, place: int, rollout: Rollout, batch: Batch) -> TokenColumns:
        stop = int(batch.cu_seqlens[place + 1])
        own = slice(stop - len(rollout.token_ids), stop)
        trained, drawn = batch.old_logp, batch.rollout_logp
        logp, gap = drawn if trained is None else trained, None
        if trained is not None and drawn is not None:
            gap = torch.where(batch.response_mask[own], trained[own] - drawn[own], 0.0)
        return TokenColumns(
            texts=self._pieces.of(rollout.token_ids),
            logp=None if logp is None else _numbers(logp[own]),
            advantage=None if batch.advantages is None else _numbers(batch.advantages[own]),
            gap=None if gap is None else _numbers(gap),
        )


def _numbers(column: torch.Tensor) -> list[float | None]:
    """To four digits after the point; None where it is no finite number."""
    rounded = column.double().round(decimals=4) + 0.0  # -0.0 is longer
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def _finite(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in parts.items() if math.isfinite(value)}

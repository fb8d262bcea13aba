"""Shows rollouts of a step as a person looks at them, with columns for their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch

from megarl.data.pieces import Pieces
from megarl.telemetry.samples import Sample, TokenColumns, chosen
from megarl.types import Batch, Rollout, Rollouts

COLUMNS = ("tokens", "response_mask", "rollout_logp", "old_logp", "advantages")
"""Columns of tokens that are shown, and that a batch needs."""


class ShownRollouts:
    """Holds some of the rollouts of a step.

    Attributes:
        step: the step's number.
    """

    def __init__(self, step: int, rollouts: Rollouts, wanted: int, pieces: Pieces) -> None:
        """
        Args:
            wanted: how many; -1: all.
        """
        self.step, self._pieces, self._tokenizer = step, pieces, pieces.tokenizer
        self._chosen = [(i, rollouts[i]) for i in chosen(rollouts.groups, wanted)]

    @property
    def places(self) -> list[int]:
        """List the places of the chosen ones among the rollouts."""
        return [place for place, _ in self._chosen]

    def samples(self, batch: Batch | None = None) -> list[Sample]:
        """Return the rollouts as text.

        Args:
            batch: made of the rollouts, with the tokens of those at `places`; adds the columns of their tokens.
        """
        if batch is None:
            return self._texts
        return [
            sample.with_tokens(self._tokens(place, rollout, batch))
            for sample, (place, rollout) in zip(self._texts, self._chosen, strict=True)
        ]

    @cached_property
    def _texts(self) -> list[Sample]:
        distinct = {
            rollout.prompt.token_ids for _, rollout in self._chosen
        }  # not by row: a conversation may begin anew
        prompts = {token_ids: self._tokenizer.decode(token_ids) for token_ids in distinct}
        return [self._sample(rollout, prompts[rollout.prompt.token_ids]) for _, rollout in self._chosen]

    def _sample(self, rollout: Rollout, prompt: str) -> Sample:
        decode, turns, turn_lengths, error = self._tokenizer.decode, None, None, None
        if rollout.episode is not None:
            turns = tuple(("policy" if drawn else "environment", decode(ids)) for drawn, ids in rollout.tokens.turns)
            turn_lengths, error = tuple(len(ids) for _, ids in rollout.tokens.turns), rollout.episode.error
        return Sample(
            prompt=prompt,
            response=decode(rollout.tokens.ids),
            answer=str(rollout.prompt.row.get("answer", "")),
            reward=rollout.reward,
            turns=turns,
            error=error,
            index=rollout.prompt.index,
            group=rollout.group,
            sample=rollout.sample,
            source=rollout.prompt.data_source,
            finish=rollout.finish_reason,
            length=len(rollout.response),
            turn_lengths=turn_lengths,
            parts=_finite(rollout.parts) or None,
        )

    def _tokens(self, place: int, rollout: Rollout, batch: Batch) -> TokenColumns:
        stop = int(batch.starts[place] + batch.lengths[place])
        response = slice(stop - len(rollout.response), stop)
        trained, drawn = batch.old_logp, batch.rollout_logp
        logp, gap = drawn if trained is None else trained, None
        if trained is not None and drawn is not None:
            gap = torch.where(batch.response_mask[response], trained[response] - drawn[response], 0.0)
        return TokenColumns(
            texts=self._pieces.of(rollout.tokens.ids),
            logp=None if logp is None else _numbers(logp[response]),
            advantage=None if batch.advantages is None else _numbers(batch.advantages[response]),
            gap=None if gap is None else _numbers(gap),
        )


def _numbers(column: torch.Tensor) -> list[float | None]:
    """Round to four digits after the point; None for a number that is not finite."""
    rounded = column.double().round(decimals=4) + 0.0  # -0.0 is longer
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def _finite(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in parts.items() if math.isfinite(value)}

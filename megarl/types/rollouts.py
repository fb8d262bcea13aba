"""Holds the prompts, completions and rollouts of a step, before they become a `Batch`, in frozen classes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.types.batch import Batch, batch_of
from megarl.types.owners import Holders, Owners
from megarl.types.tokens import Outline, Tokens


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Holds a prompt: a row of the data.

    Attributes:
        index: position of the row in its file list; stable over epochs and restarts.
        token_ids: the tokenised prompt.
        row: every column of the row as read, for the reward function.
        source: file and line of the row, "train.jsonl:17", for messages.
        data_source: value of the column `data.source_key`, or else the file's name without its ending.
    """

    index: int
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]
    source: str = ""
    data_source: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sets how tokens are drawn. `temperature` 0 is greedy; `top_k` -1 keeps the whole vocabulary.

    Attributes:
        max_tokens: response tokens at most, the stop token included.
        stop_token_ids: a response ends with (and includes) the first of these.
        stop: a response ends with the token that completes one of these strings in its text.
        routed_experts: record the experts that each token goes to; only of an engine that can.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    routed_experts: bool = False


FinishReason = Literal["stop", "length"]
"""A response ends with a stop token or string, or at its greatest length."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Holds the response of an engine to a request.

    Attributes:
        response: the request's response and the tokens drawn after it, the stop token included when there is one.
        finish_reason: "stop" after a stop token or string, "length" after `max_tokens`; None: not finished.
    """

    response: Tokens
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Describes the episode of a response in which an environment, or an agent, took part.

    Attributes:
        turns: how often the policy spoke.
        seconds: for which the environment or the agent worked.
        limited: whether a limit of turns or of tokens ended it.
        error: why it can have no score; None: it can have one.
    """

    turns: int
    seconds: float = 0.0
    limited: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Holds a response to a prompt: not begun, under way or finished.

    Attributes:
        prompt: that it answers.
        group: number of the prompt's drawing: the responses to the same drawing are compared with each other.
        sample: its number in the group.
        seed: with the place of a token in the response it makes that token's random number.
        response: the tokens so far, or what is known of them where other ranks have them.
        finish_reason: None until it is finished.
        reward: its score; None until it is scored, and where scoring failed.
        parts: of the score, and further values of the reward functions, by name.
        episode: in which it was drawn; None: the policy spoke once.
    """

    prompt: Prompt
    group: int = 0
    sample: int = 0
    seed: int = 0
    response: Tokens | Outline = field(default_factory=Tokens)
    finish_reason: FinishReason | None = None
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    episode: Episode | None = None

    @property
    def tokens(self) -> Tokens:
        """Get the response, on a rank that has its tokens."""
        assert isinstance(self.response, Tokens), "other ranks have the tokens of this response"
        return self.response


@dataclass(frozen=True, kw_only=True)
class Rollouts(Sequence[Rollout]):
    """Holds responses, the same on every rank but for their tokens; those of a group need not be adjacent.

    Attributes:
        items: one record per response.
        temperature: at which they were sampled; 1 for greedy responses, whose log-probabilities are those at 1.
        version: of the newest weights; None: versions do not matter.
        holders: the replicas whose ranks have the tokens of their own responses; None: every rank has all.
    """

    items: tuple[Rollout, ...]
    temperature: float = 1.0
    version: int | None = None
    holders: Holders | None = None

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, which: int) -> Rollout: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[Rollout, ...]: ...
    def __getitem__(self, which: int | slice) -> Rollout | tuple[Rollout, ...]:
        return self.items[which]

    @property
    def groups(self) -> list[list[int]]:
        """List the places of each group's responses, the groups in the order of their first responses."""
        places: dict[int, list[int]] = {}
        for i, rollout in enumerate(self.items):
            places.setdefault(rollout.group, []).append(i)
        return list(places.values())

    @property
    def episodes(self) -> list[list[int]]:
        """List the places of each sample's parts: one, or several where an agent's conversation began anew."""
        places: dict[tuple[int, int], list[int]] = {}
        for i, rollout in enumerate(self.items):
            places.setdefault((rollout.group, rollout.sample), []).append(i)
        return list(places.values())

    def responses(self) -> Rollouts:
        """Keep one record per sample: of several parts the last one, which is scored."""
        return self.of(self.items[places[-1]] for places in self.episodes)

    @property
    def prompts(self) -> list[Prompt]:
        """List the prompts, one per group."""
        return [self.items[places[0]].prompt for places in self.groups]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """List the rewards, one per response."""
        return tuple(rollout.reward for rollout in self.items)

    def scored(self, rewards: Sequence[float | None], parts: Sequence[Mapping[str, float]] | None = None) -> Rollouts:
        """Copy the responses, with these scores and their parts."""
        all_parts = [rollout.parts for rollout in self.items] if parts is None else parts
        scores = zip(self.items, rewards, all_parts, strict=True)
        return self.of(replace(rollout, reward=r, parts=p) for rollout, r, p in scores)

    def of_groups(self, which: Sequence[int]) -> Rollouts:
        """Select the responses of some groups, by the groups' places in `groups`."""
        groups = self.groups
        return self.of(self.items[i] for place in which for i in groups[place])

    def of(self, items: Iterable[Rollout]) -> Rollouts:
        """Make `Rollouts` of other responses that were sampled alike."""
        return replace(self, items=tuple(items))

    @staticmethod
    def joined(parts: Sequence[Rollouts]) -> Rollouts:
        """Join rollouts of equal temperature, one after the other."""
        return parts[0].of(rollout for part in parts for rollout in part)

    def to_batch(self) -> Batch:
        """Concatenate into a `Batch` with `rollout_logp` and, once one is scored, `rewards`.

        A rank gets the tokens that it gives to others, or all. Tokens that an environment said are not trained on.
        Where some responses have scores, none of the tokens of those without is trained on, and their rewards read 0.
        """
        gives = self.holders is None or self.holders.gives
        own = [rollout for rollout in self.items if gives and isinstance(rollout.response, Tokens)]
        batch = batch_of([r.prompt.token_ids for r in own], [r.tokens.ids for r in own], range(len(own)))
        of_responses = batch.response_mask
        logp = torch.zeros(len(batch.tokens))
        logp[of_responses] = torch.from_numpy(_joined([r.tokens.logp for r in own], np.float32))
        numbers: dict[int, int] = {}
        groups = [numbers.setdefault(rollout.group, len(numbers)) for rollout in self.items]
        batch = batch.with_(
            cu_seqlens=torch.tensor([0, *(len(r.prompt.token_ids) + len(r.response) for r in self.items)]).cumsum(0),
            groups=torch.tensor(groups, dtype=torch.int64),
            episodes=self._episode_of_each(),
            truncated=torch.tensor([rollout.finish_reason == "length" for rollout in self.items]),
            rollout_logp=logp,
            response_mask=_drawn(own, of_responses),
            staleness=self._staleness(own, of_responses),
            temperature=self.temperature,
            owners=self._owners(),
            **self._routing(own),
        )
        rewards = self.rewards
        if all(reward is None for reward in rewards):
            return batch
        scored = torch.tensor([reward is not None for reward in rewards])
        return batch.with_(
            rewards=torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float32),
            response_mask=batch.response_mask & batch.spread(scored),
        )

    def _owners(self) -> Owners | None:
        if self.holders is None:
            return None
        return self.holders.owners(r.response.holder if isinstance(r.response, Outline) else None for r in self.items)

    def _episode_of_each(self) -> Tensor | None:
        episodes = self.episodes
        if len(episodes) == len(self):
            return None
        part_of = torch.zeros(len(self), dtype=torch.int64)
        for number, places in enumerate(episodes):
            part_of[places] = number
        return part_of

    def _routing(self, own: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return the experts that the engine recorded, by the names of the fields of `Batch`; nothing: it did not."""
        recorded = [rollout.response.routed for rollout in self.items]
        form = next((routed for routed in recorded if routed is not None), None)
        if form is None:
            return {}
        lengths = [len(rollout.prompt.token_ids) + len(rollout.response) for rollout in own]
        experts = np.zeros((sum(lengths), form.layers, form.experts_per_token), form.dtype)
        there, start = np.zeros(len(experts), bool), 0
        for rollout, length in zip(own, lengths, strict=True):
            if (routed := rollout.tokens.routed) is not None:
                assert len(routed) <= length
                experts[start : start + len(routed)] = routed.choices
                there[start : start + len(routed)] = True
            start += length
        return {"routed_experts": torch.from_numpy(experts), "routed": torch.from_numpy(there)}

    def _staleness(self, own: Sequence[Rollout], of_responses: Tensor) -> Tensor | None:
        """Return the staleness of each token, as in `Batch`.

        Args:
            of_responses: bool [T], true at all tokens of responses.
        """
        drawn_with = {version for rollout in self.items for version, _ in rollout.response.versions}
        if self.version is None or drawn_with <= {self.version}:
            return None
        spans = [span for rollout in own for span in rollout.response.versions]
        versions, counts = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
        staleness = torch.zeros(len(of_responses), dtype=torch.int64)
        staleness[of_responses] = torch.repeat_interleave(self.version - versions, counts)
        return staleness


def _drawn(own: Sequence[Rollout], of_responses: Tensor) -> Tensor:
    """Leave out of the tokens of responses, bool [T], those that an environment said."""
    if all(rollout.tokens.sampled is None for rollout in own):
        return of_responses
    drawn = b"".join(r.tokens.sampled or b"\x01" * len(r.tokens) for r in own)
    return of_responses.masked_scatter(of_responses, torch.frombuffer(bytearray(drawn), dtype=torch.uint8).bool())


def _joined(parts: Sequence[array[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype) for part in [array("f"), *parts]])

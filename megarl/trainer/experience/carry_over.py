"""Lets responses outlive a step: generation stops when a batch is full, and unfinished ones go on under the next
weights.

More groups are under way than a step trains on, so that few GPUs wait for the longest responses of a batch ("partial
rollouts", Kimi k1.5, arXiv 2501.12599, section 2.6.2). Each token keeps the log-probability that it was drawn with.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, get_args
from zlib import crc32

import numpy as np

from megarl.checkpoint.arrays import Array
from megarl.config import Config
from megarl.rollout.expert_record import empty_record
from megarl.rollout.replicas import Quota, begin_rollouts, replicas_of_groups
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout
from megarl.types import FinishReason, Outline, Prompt, Rollout, Rollouts, RoutedExperts, Tokens

_FINISHES: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))
_OF_EACH = ("order", "prompt", "prompt_digest", "group", "sample", "seed", "finish_reason", "length", "span_count")
_ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    **dict.fromkeys(_OF_EACH, (np.int64, ())),
    **{"spans": (np.int64, (2,)), "token_ids": (np.int32, ()), "logp": (np.float32, ())},
}
"""Type, and shape after the first axis."""
_RECORDED = ("routed_tokens", "routed_experts")
"""Further arrays, where the experts of tokens are recorded."""

GoOn = Callable[[Sequence[Rollout], Quota], Rollouts]
"""Goes on with responses until the quota is reached."""


class CarryOver:
    """Holds the groups that are under way, oldest first. Joins a run, so that a resumed run goes on with them.

    Of `rollout.carry_over.groups` groups under way, the `data.train_batch_size` that are trained on are taken as they
    finish, the oldest first. No group is trained on whose first token is more than `max_staleness` versions older than
    the newest weights: generation waits for the group before.

    The ranks of the replica that went on with a response last have its tokens, the others its outline.

    Args:
        prompts: that the sampler draws from, by place.
        rank: this process's.
        unrouted: the record of a sequence whose experts are not recorded yet; None: they are not.
    """

    def __init__(
        self, config: Config, prompts: Sequence[Prompt], rank: int = 0, unrouted: RoutedExperts | None = None
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._batch_size, self._at_a_time = config.data.train_batch_size, config.groups_under_way
        self._n, self._seed, self._max_staleness = rollout.n, config.data.seed, rollout.carry_over.max_staleness
        layout = generation_layout(config)
        self._replicas, self._at, self._prompts = layout.replicas, layout.coords(rank), prompts
        self._unrouted = unrouted
        self._next_group = 0
        self._places: dict[int, int] = {}  # of each group's prompt
        self._under_way: list[Rollout] = []
        self._expected: int | None = None  # responses, of those that are loaded next

    @staticmethod
    def of(inputs: Inputs, rank: int) -> CarryOver:
        """Make the `CarryOver` of a rank of a run."""
        recorded = inputs.config.actor_rollout_ref.rollout.enable_rollout_routing_replay
        unrouted = empty_record(inputs.arch) if recorded else None
        return CarryOver(inputs.config, inputs.train_prompts, rank, unrouted)

    def next_batch(self, draw: Callable[[], Sequence[int]], go_on: GoOn, version: int) -> Rollouts:
        """Return the responses to train on; the same on every rank.

        Args:
            draw: places of the next prompts.
            version: of the weights, the number of the step.
        """
        self._start_over(version)
        draws = 0
        while len(self._places) < self._at_a_time:
            self._begin(draw(), version, draws)
            draws += 1
        chosen = set(sorted(self._places)[: self._at_a_time])
        waiting = [rollout for rollout in self._under_way if rollout.group not in chosen]
        begun = [rollout for rollout in self._under_way if rollout.group in chosen]
        oldest = version - self._max_staleness
        required = {r.group for r in begun for first, _ in r.response.versions[:1] if first <= oldest}
        quota = Quota(groups=self._batch_size, required=frozenset(required))
        rollouts = go_on(begun, quota)
        taken = self._take(rollouts, quota)
        self._under_way = [rollout for rollout in rollouts if rollout.group not in taken] + waiting
        for group in taken:
            del self._places[group]
        return rollouts.of(rollout for rollout in rollouts if rollout.group in taken)

    def metrics(self) -> dict[str, float]:
        """Count what is left under way: groups, those of them that are finished, and tokens."""
        unfinished = {rollout.group for rollout in self._under_way if rollout.finish_reason is None}
        return {
            "groups": float(len(self._places)),
            "finished": float(len(self._places) - len(unfinished)),
            "tokens": float(sum(len(rollout.response) for rollout in self._under_way)),
        }

    def state(self) -> dict[str, Any]:
        """Return the small part of what is saved, as JSON values."""
        return {"next_group": self._next_group, "responses": len(self._under_way)}

    def keep(self) -> CarryOver:
        """Keep the groups as they are now, for a save that may come later: their arrays, made then, may be
        gigabytes."""
        kept = copy(self)
        kept._places, kept._under_way = dict(self._places), list(self._under_way)
        return kept

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; the groups under way come with `load_arrays`."""
        self._next_group, self._places, self._under_way = state["next_group"], {}, []
        self._expected = state.get("responses")

    def arrays(self) -> dict[str, Array]:
        """Return the responses under way whose tokens this rank is the first to have; nothing: it never is.

        They are numbers of each of R responses, [R] int64, and one after another their tokens and the spans of the
        versions that drew them.
        """
        if self._at.tp:
            return {}
        own = [(i, rollout) for i, rollout in enumerate(self._under_way) if self._saves(rollout)]
        under_way = [rollout for _, rollout in own]
        spans = [span for rollout in under_way for span in rollout.response.versions]
        return {
            "order": _numbers(i for i, _ in own),
            "prompt": _numbers(self._places[rollout.group] for rollout in under_way),
            "prompt_digest": _numbers(_digest(rollout.prompt) for rollout in under_way),
            "group": _numbers(rollout.group for rollout in under_way),
            "sample": _numbers(rollout.sample for rollout in under_way),
            "seed": _numbers(rollout.seed for rollout in under_way),
            "finish_reason": _numbers(_FINISHES.index(rollout.finish_reason) for rollout in under_way),
            "length": _numbers(len(rollout.response) for rollout in under_way),
            "span_count": _numbers(len(rollout.response.versions) for rollout in under_way),
            "spans": np.array(spans, np.int64).reshape(-1, 2),
            "token_ids": _joined((rollout.tokens.ids for rollout in under_way), np.int32),
            "logp": _joined((rollout.tokens.logp for rollout in under_way), np.float32),
            **self._routing(under_way),
        }

    def _saves(self, rollout: Rollout) -> bool:
        """Tell whether this rank saves a response, if it is its replica's first: one not begun is every replica's."""
        if not len(rollout.response):
            return self._at.replica == 0
        return isinstance(rollout.response, Tokens)

    def _routing(self, under_way: Sequence[Rollout]) -> dict[str, Array]:
        """Return the recorded experts: of how many tokens of each response, [R] int64, and one after another which."""
        if (empty := self._unrouted) is None:
            return {}
        records = [rollout.tokens.routed or empty for rollout in under_way]
        choices = [record.choices for record in (empty, *records)]
        return {"routed_tokens": _numbers(len(record) for record in records), "routed_experts": np.concatenate(choices)}

    def _records(self, arrays: Mapping[str, Array], lengths: Sequence[int]) -> list[RoutedExperts | None]:
        """Read what `_routing` returned; none where the run that saved them recorded none.

        Raises:
            ValueError: as `load_arrays`.
        """
        if (empty := self._unrouted) is None or not arrays.keys() & set(_RECORDED):
            return [None] * len(lengths)
        if missing := set(_RECORDED) - arrays.keys():
            raise ValueError(f"the responses under way lack {', '.join(sorted(missing))}")
        counts, experts = (arrays[name] for name in _RECORDED)
        if experts.dtype != empty.dtype or experts.shape[1:] != empty.choices.shape[1:] or counts.dtype != np.int64:
            raise ValueError("the experts of the responses under way have another type or shape")
        whole = counts.shape == (len(lengths),) and (counts >= 0).all() and counts.sum() == len(experts)
        if not whole or (experts < 0).any() or (experts >= empty.num_experts).any():
            raise ValueError("the experts of the responses under way do not add up: their file is damaged")
        return [empty.followed_by(part) for part in np.split(experts, np.cumsum(counts)[:-1])] if len(counts) else []

    def load_arrays(self, parts: Iterable[Mapping[str, Array]]) -> None:
        """Go on with the responses that all ranks have saved. A group whose prompt is not there any more is left out.

        Raises:
            ValueError: an array is missing, or they do not belong together.
        """
        placed: list[tuple[int, Rollout | None]] = []
        for arrays in parts:
            placed += self._placed(arrays)
        placed.sort(key=lambda one: one[0])
        expected = len(placed) if self._expected is None else self._expected
        if [order for order, _ in placed] != list(range(expected)):
            raise ValueError("the files of the responses under way do not belong together: some are missing or twice")
        self._under_way = [rollout for _, rollout in placed if rollout is not None]

    def _placed(self, arrays: Mapping[str, Array]) -> Iterator[tuple[int, Rollout | None]]:
        """Read the responses that a rank has saved, each with its place among all; None: its prompt has gone."""
        if "order" not in arrays and "prompt" in arrays:  # one file had all, in their order
            arrays = {**arrays, "order": np.arange(arrays["prompt"].size)}
        if missing := _ARRAYS.keys() - arrays.keys():
            raise ValueError(f"the responses under way lack {', '.join(sorted(missing))}")
        for name, (kind, shape) in _ARRAYS.items():
            if arrays[name].dtype != kind or arrays[name].shape[1:] != shape or not arrays[name].ndim:
                raise ValueError(f"{name} of the responses under way has another type or shape")
        if any((arrays[name] < 0).any() for name in ("prompt", "finish_reason", "length", "span_count", "token_ids")):
            raise ValueError("the responses under way have numbers below 0")
        if (arrays["finish_reason"] >= len(_FINISHES)).any():
            raise ValueError("the responses under way end as none can")
        whole = {name: arrays[name].tolist() for name in _OF_EACH}
        token_ends, span_ends = np.cumsum(arrays["length"]).tolist(), np.cumsum(arrays["span_count"]).tolist()
        tokens, drawn = len(arrays["token_ids"]), len(arrays["spans"])
        if {len(column) for column in whole.values()} - {len(token_ends)} or len(arrays["logp"]) != tokens:
            raise ValueError("the lengths of the responses under way do not add up: their file is damaged")
        if token_ends and (token_ends[-1], span_ends[-1]) != (tokens, drawn):
            raise ValueError("the lengths of the responses under way do not add up: their file is damaged")
        records = self._records(arrays, token_ends)
        for i, (token_end, span_end) in enumerate(zip(token_ends, span_ends, strict=True)):
            row = {name: column[i] for name, column in whole.items()}
            place, tokens_of_row = row["prompt"], slice(token_end - row["length"], token_end)
            if place >= len(self._prompts) or _digest(prompt := self._prompts[place]) != row["prompt_digest"]:
                yield row["order"], None
                continue
            if (record := records[i]) is not None and len(record) > len(prompt.token_ids) + row["length"]:
                raise ValueError("the responses under way have fewer tokens than experts were recorded of")
            self._places[row["group"]] = place
            versions = arrays["spans"][span_end - row["span_count"] : span_end].tolist()
            tokens_read = Tokens(
                ids=array("i", arrays["token_ids"][tokens_of_row].tobytes()),
                logp=array("f", arrays["logp"][tokens_of_row].tobytes()),
                versions=tuple((version, count) for version, count in versions),
                routed=record,
            )
            rollout = Rollout(
                prompt=prompt,
                group=row["group"],
                sample=row["sample"],
                seed=row["seed"],
                response=self._held(tokens_read, row["group"]),
                finish_reason=_FINISHES[row["finish_reason"]],
            )
            yield row["order"], rollout

    def _held(self, response: Tokens, group: int) -> Tokens | Outline:
        """Keep the tokens on the ranks of one replica, whichever had them when they were saved."""
        holder = group % self._replicas
        return response if not len(response) or holder == self._at.replica else response.outline(holder)

    def _begin(self, places: Sequence[int], version: int, draw: int) -> None:
        prompts, first = [self._prompts[place] for place in places], self._next_group
        settings = {"seed": self._seed, "round_": version, "draw": draw, "first_group": first}
        self._under_way += begin_rollouts(prompts, self._n, **settings)
        self._places |= {first + i: place for i, place in enumerate(places)}
        self._next_group += len(places)

    def _start_over(self, version: int) -> None:
        """Begin groups anew that later weights have drawn: the run went back to an earlier step."""
        undone = {r.group for r in self._under_way for drawn_with, _ in r.response.versions if drawn_with >= version}
        self._under_way = [
            replace(r, response=Tokens(), finish_reason=None, reward=None) if r.group in undone else r
            for r in self._under_way
        ]

    def _take(self, rollouts: Rollouts, quota: Quota) -> set[int]:
        """Choose among the finished groups of each replica its share: the required ones, then the oldest."""
        unfinished = {rollout.group for rollout in rollouts if rollout.finish_reason is None}
        finished: dict[int, list[int]] = {}
        for group, replica in replicas_of_groups(rollouts, self._replicas).items():
            if group not in unfinished:
                finished.setdefault(replica, []).append(group)
        taken: set[int] = set()
        for replica, groups in finished.items():
            in_order = sorted(groups, key=lambda group: (group not in quota.required, group))
            taken.update(in_order[: quota.share(replica, self._replicas)])
        return taken


def _numbers(values: Iterable[int]) -> Array:
    return np.fromiter(values, np.int64)


def _joined(parts: Iterable[array[Any]], dtype: type) -> Array:
    return np.frombuffer(b"".join(part.tobytes() for part in parts), dtype)


def _digest(prompt: Prompt) -> int:
    return crc32(array("i", prompt.token_ids).tobytes())

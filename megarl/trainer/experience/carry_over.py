"""Responses that outlive a step: generation stops when a batch is full, and what is unfinished goes on under the next
weights.

More groups are under way than a step trains on, so that few GPUs wait for the longest responses of a batch ("partial
rollouts", Kimi k1.5, arXiv 2501.12599, section 2.6.2). Each token keeps the log-probability that it was drawn with.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from megarl.config import Config
from megarl.parallel.groups import Groups
from megarl.rollout.replicas import Quota, begin_rollouts, replicas_of_groups
from megarl.types import Prompt, Rollout, Rollouts

GoOn = Callable[[Sequence[Rollout], Quota], Rollouts]
"""Responses, further: until the quota is reached."""


class CarryOver:
    """The groups that are under way, oldest first. Joins a run, so that one that resumes goes on with them.

    Of `rollout.carry_over.groups` groups under way, the `data.train_batch_size` that are trained on are taken as they
    finish, the oldest first. None is trained on whose first token is by more than `max_staleness` versions older than
    the newest weights: generation waits for it before.

    Args:
        prompts: that the sampler draws from, by place.
    """

    def __init__(self, config: Config, groups: Groups, prompts: Sequence[Prompt]) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._wanted, self._at_a_time = config.data.train_batch_size, config.groups_under_way
        self._n, self._seed, self._max_staleness = rollout.n, config.data.seed, rollout.carry_over.max_staleness
        self._replicas, self._prompts = groups.generation.replicas, prompts
        self._next_group = 0
        self._places: dict[int, int] = {}  # of each group's prompt
        self._under_way: list[Rollout] = []

    def next_batch(self, draw: Callable[[], Sequence[int]], go_on: GoOn, version: int) -> Rollouts:
        """The responses to train on; the same on every rank.

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
        asked = [rollout for rollout in self._under_way if rollout.group in chosen]
        required = {r.group for r in asked if r.versions and version - r.versions[0][0] >= self._max_staleness}
        quota = Quota(groups=self._wanted, required=frozenset(required))
        made = go_on(asked, quota)
        taken = self._take(made, quota)
        self._under_way = [rollout for rollout in made if rollout.group not in taken] + waiting
        for group in taken:
            del self._places[group]
        return made.of(rollout for rollout in made if rollout.group in taken)

    def metrics(self) -> dict[str, float]:
        """What is left under way: groups, those of them that are finished, and tokens."""
        unfinished = {rollout.group for rollout in self._under_way if rollout.finish_reason is None}
        return {
            "groups": float(len(self._places)),
            "finished": float(len(self._places) - len(unfinished)),
            "tokens": float(sum(len(rollout.token_ids) for rollout in self._under_way)),
        }

    def state(self) -> dict[str, Any]:
        """The groups under way, in JSON's values; token ids and log-probabilities as base64 of their bytes."""
        return {"next_group": self._next_group, "rollouts": [self._saved(rollout) for rollout in self._under_way]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Groups whose prompt is not there any more are left out."""
        self._next_group, self._places, self._under_way = state["next_group"], {}, []
        for saved in state["rollouts"]:
            place = saved["prompt"]
            if place < len(self._prompts) and _digest(prompt := self._prompts[place]) == saved["prompt_digest"]:
                self._places[saved["group"]] = place
                self._under_way.append(_restored(saved, prompt))

    def _begin(self, places: Sequence[int], version: int, draw: int) -> None:
        prompts, first = [self._prompts[place] for place in places], self._next_group
        settings = {"seed": self._seed, "round_": version, "draw": draw, "first_group": first}
        self._under_way += begin_rollouts(prompts, self._n, **settings)
        self._places |= {first + i: place for i, place in enumerate(places)}
        self._next_group += len(places)

    def _start_over(self, version: int) -> None:
        """Where a run went back to an earlier step: what later weights have drawn is not to be trained on."""
        undone = {r.group for r in self._under_way if any(made_with >= version for made_with, _ in r.versions)}
        nothing: dict[str, Any] = {"versions": (), "finish_reason": None, "reward": None, "sampled": None}
        self._under_way = [
            replace(r, token_ids=array("i"), logp=array("f"), **nothing) if r.group in undone else r
            for r in self._under_way
        ]

    def _take(self, made: Rollouts, quota: Quota) -> set[int]:
        """Of the finished groups of each replica its share: those that are required, then the oldest."""
        unfinished = {rollout.group for rollout in made if rollout.finish_reason is None}
        finished: dict[int, list[int]] = {}
        for group, replica in replicas_of_groups(made, self._replicas).items():
            if group not in unfinished:
                finished.setdefault(replica, []).append(group)
        taken: set[int] = set()
        for replica, groups in finished.items():
            in_order = sorted(groups, key=lambda group: (group not in quota.required, group))
            taken.update(in_order[: quota.share(replica, self._replicas)])
        return taken

    def _saved(self, rollout: Rollout) -> dict[str, Any]:
        return {
            "prompt": self._places[rollout.group],
            "prompt_digest": _digest(rollout.prompt),
            "group": rollout.group,
            "sample": rollout.sample,
            "seed": rollout.seed,
            "token_ids": b64encode(rollout.token_ids.tobytes()).decode(),
            "logp": b64encode(rollout.logp.tobytes()).decode(),
            "versions": [list(span) for span in rollout.versions],
            "finish_reason": rollout.finish_reason,
        }


def _restored(saved: Mapping[str, Any], prompt: Prompt) -> Rollout:
    return Rollout(
        prompt=prompt,
        group=saved["group"],
        sample=saved["sample"],
        seed=saved["seed"],
        token_ids=array("i", b64decode(saved["token_ids"])),
        logp=array("f", b64decode(saved["logp"])),
        versions=tuple((version, tokens) for version, tokens in saved["versions"]),
        finish_reason=saved["finish_reason"],
    )


def _digest(prompt: Prompt) -> int:
    return crc32(array("i", prompt.token_ids).tobytes())

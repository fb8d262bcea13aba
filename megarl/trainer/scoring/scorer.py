"""Scores the rollouts, in processes beside the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.data.readers import value_or_none
from megarl.parallel.world import World
from megarl.rewards.in_rank import InRank
from megarl.rewards.parts import functions_of
from megarl.rewards.pool import RewardPool
from megarl.rewards.results import Failure, Response, RewardError, Scored
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout
from megarl.trainer.records.score_metrics import call_metrics, parts_by_name
from megarl.trainer.scoring.reward_workers import host_here, workers_of
from megarl.types import Rollout, Rollouts, Tokens

Score = Callable[[Rollouts], Rollouts]
"""Rollouts -> the same with `rewards`; every rank calls it."""

Results = dict[tuple[int, int], Scored | Failure]
"""Results of responses, by `_key`."""


class Scorer:
    """Scores responses for as long as a run lasts; its worker processes start when it is constructed.

    The first rank of each generation replica has workers of its own. A function that a program gave, and that no other
    process can find, is called in those ranks themselves.
    """

    def __init__(self, inputs: Inputs, world: World, say: Callable[[str], None]) -> None:
        """
        Args:
            say: shows how many responses could not be scored.
        """
        self._functions = functions_of(inputs.rewards)
        assert self._functions, "a reward model scores by itself"
        self._inputs, self._world, self._say = inputs, world, say
        layout = generation_layout(inputs.config)
        self._leaders = [layout.replica_ranks(replica)[0] for replica in range(layout.replicas)]
        self._noted: list[Scored | Failure] = []
        self._early: Results = {}
        hosts = world.all_gather(host_here(scores=world.rank in self._leaders), "the CPU cores of the ranks")
        settings, workers = inputs.config.reward, workers_of(world.rank, hosts, inputs.config.reward.workers)
        self._pool: RewardPool | InRank | None = None
        if workers and all(part.reward.named for part in self._functions):
            self._pool = RewardPool(self._functions, settings, workers)
        elif workers:
            self._pool = InRank(self._functions[0], settings)

    def submit(self, place: int, rollout: Rollout) -> None:
        """Have a finished response scored while others are being generated: an `OnFinished`."""
        del place
        assert self._pool is not None, "the first rank of each replica scores"
        if not self._reads(rollout):
            return
        assert rollout.finish_reason is not None
        text = self._inputs.tokenizer.decode(rollout.tokens.ids)
        response = Response(
            text=text,
            tokens=len(rollout.response),
            finish_reason=rollout.finish_reason,
            prompt=value_or_none(rollout.prompt.row, self._inputs.config.data.prompt_key),
        )
        self._pool.submit(_key(rollout), response, rollout.prompt, rollout.prompt.data_source)

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        """Return the rollouts with `rewards`, the same on every rank; those that nobody submitted are scored now.

        With `reward.on_error` drop or retry a response that could not be scored has the reward None, and one line says
        how many of them there are.

        Raises:
            RewardError: a response could not be scored, with `reward.on_error=fail`, or none at all could.
        """
        results = self._early | self._collect()
        missing = [rollout for rollout in rollouts if self._reads(rollout) and _key(rollout) not in results]
        if missing:
            if self._pool is not None:
                shared_out = missing[self._leaders.index(self._world.rank) :: len(self._leaders)]
                here = [rollout for rollout in missing if isinstance(rollout.response, Tokens)]
                for rollout in shared_out if rollouts.holders is None else here:
                    self.submit(0, rollout)
            results |= self._collect()
        keys = {_key(rollout) for rollout in rollouts}
        self._early = {key: result for key, result in results.items() if key not in keys}
        nothing = Scored(score=0.0)
        return self._with_rewards(
            rollouts, [results[_key(rollout)] if self._reads(rollout) else nothing for rollout in rollouts]
        )

    def _reads(self, rollout: Rollout) -> bool:
        """Tell whether a function scores the rollout; else a reward model alone does."""
        return any(part.applies_to(rollout.prompt.data_source) for part in self._functions)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the calls since the last time: see `call_metrics`."""
        noted, self._noted = self._noted, []
        return call_metrics(noted)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._pool is not None:
            self._pool.close()

    def _collect(self) -> Results:
        """Gather the results of all responses that were submitted on any rank since the last time; every rank calls
        it."""
        mine: dict[Any, Scored | Failure] = {}
        wrong: str | None = None
        try:
            if self._pool is not None:
                mine = self._pool.collect()
        except RewardError as e:
            wrong = str(e)
        failure = next(
            (result for result in mine.values() if isinstance(result, Failure) and not result.left_out), None
        )
        if failure is not None and self._inputs.config.reward.on_error == "fail":
            wrong = f"{failure}\n(reward.on_error=drop leaves out the responses that cannot be scored)"
        gathered: list[Results | str] = self._world.all_gather(mine if wrong is None else wrong, "all scores")
        results: Results = {}
        for rank, of_rank in enumerate(gathered):
            if isinstance(of_rank, str):
                raise RewardError(of_rank, rank=rank)
            results |= of_rank
        return results

    def _with_rewards(self, rollouts: Rollouts, results: list[Scored | Failure]) -> Rollouts:
        failures = [result for result in results if isinstance(result, Failure)]
        if len(failures) == len(results):
            raise RewardError(f"none of {len(results)} responses could be scored; the first: {failures[0]}")
        if failures:
            first = failures[0].reason
            self._say(f"{len(failures)} of {len(results)} responses could not be scored; the first: {first}")
        self._noted += results
        return rollouts.scored(
            [None if isinstance(result, Failure) else result.score for result in results],
            [{} if isinstance(result, Failure) else parts_by_name(result) for result in results],
        )


def _key(rollout: Rollout) -> tuple[int, int]:
    """Return what tells responses apart between two collections: equal tokens to one prompt have the same score."""
    return rollout.seed, rollout.response.digest

"""Builds and scores the episodes of a run, in which an environment or an agent answers the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megarl.config import Config
from megarl.environments.environment import environment_of
from megarl.environments.environment_episodes import EpisodeLimits, WithEnvironments
from megarl.environments.episodes import Episodes, Source
from megarl.environments.speech import Speech
from megarl.parallel.generation_groups import GenerationGroups
from megarl.rewards.results import RewardError
from megarl.trainer.inputs import Inputs
from megarl.trainer.scoring.scorer import Score
from megarl.types import Rollout, Rollouts, SamplingParams


def build_episodes(inputs: Inputs, groups: GenerationGroups) -> Episodes | None:
    """Build what answers the policy, as the configuration says; None: nothing does. Every rank calls it."""
    config = inputs.config
    settings, data = config.environment, config.data
    if not settings.answers:
        return None
    speech = Speech(
        inputs.tokenizer, stop_tokens=inputs.stop_tokens, role=settings.role, limit=settings.max_observation_length
    )
    limits = EpisodeLimits(
        max_turns=settings.max_turns,
        max_prompt_length=data.max_prompt_length,
        at_a_time=config.actor_rollout_ref.rollout.max_num_seqs,
        timeout=settings.timeout,
        threads=settings.workers,
    )
    if settings.agent:
        from megarl.environments.agent_episodes import Agents  # imports an HTTP server, which takes half a second

        agents = Agents(settings.agent, speech=speech, limits=limits, training=inputs.sampling(validation=False))
        return Episodes(groups, agents.begin, agents.close)
    make = environment_of(settings.name, settings.args)

    def begin(mine: Mapping[int, Rollout], params: SamplingParams) -> Source:
        keys = {"prompt_key": data.prompt_key, "tools_key": data.tools_key}
        return WithEnvironments(mine, params, make=make, speech=speech, limits=limits, **keys)

    return Episodes(groups, begin)


def score_episodes(
    rollouts: Rollouts, *, score: Score, config: Config, say: Callable[[str], None], last_turn: bool = True
) -> Rollouts:
    """Return the rollouts with `rewards`: those of an environment or an agent, else those of the run's own scoring.

    The rollouts of one sample are parts of one episode: the last one is scored, and all have its reward.

    Args:
        score: scores the episodes without a reward.
        say: shows a line.
        last_turn: `score` reads the last turn of the policy, not the whole response.

    Raises:
        RewardError: an episode failed, with `reward.on_error=fail`, or all did; or what `score` raises.
    """
    last = [places[-1] for places in rollouts.episodes]
    errors = [error for i in last if (error := _error(rollouts[i])) is not None]
    count = f"{len(errors)} of {len(last)} episodes failed; the first: "
    if errors and (config.reward.on_error == "fail" or len(errors) == len(last)):
        remark = "reward.on_error=drop leaves out the episodes that fail"
        raise RewardError(f"{count}{errors[0]}\n({remark})")
    if errors:
        say(count + errors[0].partition("\n")[0])
    unscored = [i for i in sorted(last) if _unscored(rollouts[i])]
    rewards, parts = [rollout.reward for rollout in rollouts], [rollout.parts for rollout in rollouts]
    if unscored:
        read = rollouts.of((_last_turn if last_turn else _itself)(rollouts[i]) for i in unscored)
        for i, judged in zip(unscored, score(read), strict=True):
            rewards[i], parts[i] = judged.reward, judged.parts
    for parts_of_one in rollouts.episodes:
        for i in parts_of_one:
            rewards[i], parts[i] = rewards[parts_of_one[-1]], parts[parts_of_one[-1]]
    return rollouts.scored(rewards, parts)


def _unscored(rollout: Rollout) -> bool:
    return rollout.reward is None and _error(rollout) is None


def _error(rollout: Rollout) -> str | None:
    return None if rollout.episode is None else rollout.episode.error


def _itself(rollout: Rollout) -> Rollout:
    return rollout


def _last_turn(rollout: Rollout) -> Rollout:
    """Return the rollout with its last turn of the policy as its response."""
    return replace(rollout, response=rollout.response.last_turn)

"""Answers and scores the held-out prompts, in a validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from megarl.config import Config
from megarl.data.readers import value_or_none
from megarl.evaluation.answers import AnswerOf, answer_in
from megarl.evaluation.records import Record
from megarl.evaluation.summary import metrics, summarize
from megarl.hybrid.generation import Generation
from megarl.parallel.world import World
from megarl.rewards.parts import Part
from megarl.rollout.replicas import OnFinished
from megarl.trainer.digests import digest
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.score_metrics import part_metrics
from megarl.trainer.records.step_metrics import episode_metrics, reward_metrics
from megarl.trainer.scoring.episodes import score_episodes
from megarl.trainer.scoring.scorer import Score
from megarl.trainer.session.run import Run
from megarl.types import Prompt, Rollout, Rollouts


def evaluate(run: Run, generation: Generation, score: Score | None = None) -> dict[str, float]:
    """Answer and score each held-out prompt `rollout.val_kwargs.n` times; the responses go into the run's folder.

    Args:
        score: gives the scores; default: the run's reward function.

    Returns:
        val/reward, val/accuracy, val/failed, as `reward_metrics` has them, and below val/ what `metrics` says of data
        sources and of several samples, and `part_metrics` of parts; of episodes val/turns, their mean.
    """
    rollouts = answered(run, generation, score)
    records = records_of(rollouts, run.inputs, run.world)
    run.report.validation(run.row, records)
    overall, episodes = reward_metrics(rollouts.responses()), episode_metrics(rollouts)
    details = {**part_metrics(rollouts.responses()), **run.score_metrics()}
    parts = {f"val/{name}": value for name, value in details.items() if not name.startswith(("latency_", "source/"))}
    return {
        "val/reward": overall["mean"],
        "val/accuracy": overall["accuracy"],
        "val/failed": overall["failed"],
        **({"val/turns": episodes["turns_mean"]} if episodes else {}),
        **parts,
        **{f"val/{name}": value for name, value in metrics(summarize(records, ks_of(run.inputs))).items()},
    }


def answered(
    run: Run, generation: Generation, score: Score | None = None, on_finished: OnFinished | None = None
) -> Rollouts:
    """Answer all held-out prompts, and score the responses.

    A response's seed depends on `data.seed`, its prompt's index and its number alone: two models, and two steps of a
    run, are asked the same way.

    Args:
        on_finished: is told of each response as soon as it is finished, beside the run's reward function.
    """
    inputs, scores = run.inputs, run.on_finished

    def told(place: int, rollout: Rollout) -> None:
        for listener in (scores, on_finished):
            if listener is not None:
                listener(place, rollout)

    n, params = inputs.config.actor_rollout_ref.rollout.val_kwargs.n, inputs.sampling(validation=True)
    with generation.phase():
        rollouts = generation.rollouts(
            inputs.val_prompts, n, params, seed=inputs.config.data.seed, round_=0, on_finished=told
        )
    return (score or partial(_score, run))(rollouts)


def _score(run: Run, rollouts: Rollouts) -> Rollouts:
    run.score_metrics()  # what a flow has scored before and not asked about
    if not run.config.environment.answers:
        return run.score(rollouts)
    return score_episodes(rollouts, score=run.score, config=run.config, say=run.report.say)


def _row_digest(prompt: Prompt, config: Config) -> str:
    """Digest what tells prompts apart; an environment or an agent may read any column of the row."""
    read = dict(prompt.row) if config.environment.answers else value_or_none(prompt.row, config.data.prompt_key)
    return digest([json.dumps(read, sort_keys=True, default=str).encode()])


def records_of(rollouts: Rollouts, inputs: Inputs, world: World) -> list[Record]:
    """Decode the responses, the same on every rank; rank r decodes every world-size-th."""
    rollouts = rollouts.responses()
    decode = inputs.tokenizer.decode
    mine: list[tuple[str, str, str | None]] = []
    for rollout in rollouts[world.rank :: world.size]:
        prompt = decode(rollout.prompt.token_ids) if rollout.sample == 0 else ""  # once for all samples
        response = decode(rollout.tokens.ids)
        mine.append((prompt, response, _answer_of(inputs.rewards, rollout.prompt.data_source)(response)))
    gathered = world.all_gather(mine, "the responses as text")
    texts = [gathered[i % world.size][i // world.size] for i in range(len(rollouts))]
    prompts = {rollout.group: text[0] for rollout, text in zip(rollouts, texts, strict=True) if rollout.sample == 0}
    first = [rollout for rollout in rollouts if rollout.sample == 0]
    rows = {rollout.group: _row_digest(rollout.prompt, inputs.config) for rollout in first}
    return [
        Record(
            index=rollout.prompt.index,
            sample=rollout.sample,
            source=rollout.prompt.data_source,
            row=rows[rollout.group],
            prompt=prompts[rollout.group],
            response=response,
            answer=str(rollout.prompt.row.get("answer", "")),
            vote=vote,
            score=rollout.reward,
            finish=str(rollout.finish_reason),
            tokens=len(rollout.response),
        )
        for rollout, (_, response, vote) in zip(rollouts, texts, strict=True)
    ]


def ks_of(inputs: Inputs) -> list[int]:
    """Return the k of pass@k and maj@k; empty: the default."""
    return inputs.config.actor_rollout_ref.rollout.val_kwargs.k


def _answer_of(rewards: Sequence[Part], source: str) -> AnswerOf:
    """Return how an answer is read: by the attribute `answer_of` of the first reward function that has one."""
    readers = (getattr(part.reward.function, "answer_of", None) for part in rewards if part.applies_to(source))
    return next((answer_of for answer_of in readers if answer_of is not None), answer_in)

"""Scores by a reward model, or by the reward function: what a run's configuration asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from megarl.data.conversations import conversation_ids
from megarl.data.messages import are_messages
from megarl.data.readers import Row, value_at
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.data.tools import tools_of
from megarl.parallel.world import World
from megarl.rewards.parts import Part, functions_of
from megarl.rewards.results import RewardError
from megarl.roles.frozen import Judge
from megarl.trainer.build import build_judge
from megarl.trainer.experience.episodes import score_episodes
from megarl.trainer.experience.scoring import Score
from megarl.trainer.inputs import Inputs
from megarl.trainer.other_models import own_tokenizer
from megarl.trainer.session import Run
from megarl.types import Batch, Rollouts, batch_of


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What scores rollouts, itself a `Score`.

    Attributes:
        functions: gives all scores, or those to which `model` adds. A reward model that scores alone stands here, too.
        model: adds a reward model's part; None: there is none.
    """

    functions: Score
    model: Score | None = None

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        rollouts = self.functions(rollouts)
        return rollouts if self.model is None else self.model(rollouts)


def scorer(run: Run) -> Scoring:
    """How rollouts are scored; a reward model joins the run."""
    parts = run.inputs.rewards
    by_function, by_model = bool(functions_of(parts)), next((part for part in parts if part.by_model), None)
    judged: Score = run.score
    if by_model is not None:
        judge, folder = run.add("reward_model", build_judge(run)), own_tokenizer(run.config)
        judged = partial(score_by_model, run=run, judge=judge, tokenizer=_tokenizer(run, folder) if folder else None)
        if by_function:
            return Scoring(functions=run.score, model=partial(add_part, part=by_model, judged=judged))
    if run.config.environment.answers:
        judged = partial(score_episodes, score=judged, config=run.config, say=run.report.say, last_turn=by_function)
    return Scoring(functions=judged)


def add_part(rollouts: Rollouts, *, part: Part, judged: Score) -> Rollouts:
    """The same rollouts with a reward model's part in the scores of those that have one and that it applies to.

    Args:
        judged: gives the model's scores.
    """
    asked = [i for i, one in enumerate(rollouts) if one.reward is not None and part.applies_to(one.prompt.data_source)]
    if not asked:
        return rollouts
    rewards, parts = list(rollouts.rewards), [rollout.parts for rollout in rollouts]
    for i, one in zip(asked, judged(rollouts.of(rollouts[i] for i in asked)).rewards, strict=True):
        before = rewards[i]
        assert before is not None and one is not None
        rewards[i], parts[i] = before + part.weight * one, {**parts[i], f"part/{part.label}": one}
    return rollouts.scored(rewards, parts)


def _tokenizer(run: Run, folder: str) -> Tokenizer:
    return load_tokenizer(folder, read_special_tokens=run.config.data.read_special_tokens)


def score_by_model(rollouts: Rollouts, *, run: Run, judge: Judge, tokenizer: Tokenizer | None) -> Rollouts:
    """The same rollouts with the model's scores of prompt and response, as `rewards`.

    Args:
        tokenizer: the model's, if it is another than the policy's: texts are then encoded anew.

    Raises:
        RewardError: a score that is no finite number, or a text that is too long for the model.
    """
    if tokenizer is None:
        batch = rollouts.scored([None] * len(rollouts)).to_batch()
    else:
        batch = encoded_anew(rollouts, run.inputs, run.world, tokenizer)
        _check_lengths(batch, rollouts, run, judge)
    scores = judge.scores(batch, judge.plan(batch)).tolist()
    for rollout, value in zip(rollouts, scores, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"{rollout.prompt.source}: the reward model's score of a response is {value}")
    return rollouts.scored(scores)


def encoded_anew(rollouts: Rollouts, inputs: Inputs, world: World, tokenizer: Tokenizer) -> Batch:
    """Prompts and responses in the tokens, and the chat template, of another tokenizer; the same on every rank.

    Every rank encodes every world-size-th of them.
    """
    data = inputs.config.data
    mine: list[list[int]] = []
    for rollout in rollouts[world.rank :: world.size]:
        prompt, source = value_at(rollout.prompt.row, data.prompt_key), rollout.prompt.source
        response, ended = inputs.tokenizer.decode(rollout.token_ids), rollout.finish_reason == "stop"
        if are_messages(prompt):
            tools = tools_of(Row(source, rollout.prompt.row), data.tools_key)
            mine.append(conversation_ids(prompt, response, source, tokenizer, ended=ended, tools=tools))
        else:
            mine.append([*tokenizer.encode(f"{prompt}{response}"), *[tokenizer.eos_id] * ended])
    gathered = world.all_gather(mine, "the texts for the reward model")
    texts = [gathered[i % world.size][i // world.size] for i in range(len(rollouts))]
    return batch_of(texts, [()] * len(texts), range(len(texts)))


def _check_lengths(batch: Batch, rollouts: Rollouts, run: Run, judge: Judge) -> None:
    batching, longest = run.config.reward_model, int(batch.lengths.max())
    limits = {"its positions": judge.arch.max_position_embeddings}
    if batching.use_dynamic_bsz:
        limits["reward_model.ppo_max_token_len_per_gpu"] = batching.ppo_max_token_len_per_gpu
    for name, limit in limits.items():
        if longest > limit:
            source = rollouts[int(batch.lengths.argmax())].prompt.source
            raise RewardError(
                f"{source}: prompt and response have {longest} tokens for the reward model, more than {name} = {limit}"
            )

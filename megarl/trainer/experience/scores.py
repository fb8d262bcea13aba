"""Scores rollouts by a reward model, by reward functions, or by both."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from megarl.rollout.gathering import gathered
from megarl.trainer.build import build_judge
from megarl.trainer.inputs import Inputs
from megarl.trainer.other_models import own_tokenizer
from megarl.trainer.scoring.episodes import score_episodes
from megarl.trainer.scoring.scorer import Score
from megarl.trainer.session.run import Run
from megarl.types import Batch, Rollouts, Tokens, batch_of


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores rollouts by reward functions and a reward model, as a `Score`.

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
    """Return what scores the run's rollouts; a reward model joins the run."""
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
    """Add a reward model's part to the scores of the rollouts that have one and that it applies to.

    Args:
        judged: gives the model's scores.
    """
    places = [i for i, r in enumerate(rollouts) if r.reward is not None and part.applies_to(r.prompt.data_source)]
    if not places:
        return rollouts
    rewards, parts = list(rollouts.rewards), [rollout.parts for rollout in rollouts]
    for i, score in zip(places, judged(rollouts.of(rollouts[i] for i in places)).rewards, strict=True):
        before = rewards[i]
        assert before is not None and score is not None
        rewards[i], parts[i] = before + part.weight * score, {**parts[i], f"part/{part.label}": score}
    return rollouts.scored(rewards, parts)


def _tokenizer(run: Run, folder: str) -> Tokenizer:
    return load_tokenizer(folder, read_special_tokens=run.config.data.read_special_tokens)


def score_by_model(rollouts: Rollouts, *, run: Run, judge: Judge, tokenizer: Tokenizer | None) -> Rollouts:
    """Score prompt and response of each rollout by the model; returns the rollouts with these `rewards`.

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
    """Encode prompts and responses with another tokenizer and its chat template; the same on every rank.

    Every rank encodes every world-size-th of them, or of those that it has the tokens of.
    """
    data = inputs.config.data
    mine: dict[int, list[int]] = {}
    for i in _shared_out(rollouts, world):
        rollout = rollouts[i]
        prompt, source = value_at(rollout.prompt.row, data.prompt_key), rollout.prompt.source
        response, ended = inputs.tokenizer.decode(rollout.tokens.ids), rollout.finish_reason == "stop"
        if are_messages(prompt):
            tools = tools_of(Row(source, rollout.prompt.row), data.tools_key)
            mine[i] = conversation_ids(prompt, response, source, tokenizer, ended=ended, tools=tools)
        else:
            mine[i] = [*tokenizer.encode(f"{prompt}{response}"), *[tokenizer.eos_id] * ended]
    texts = gathered(world, mine, "the texts for the reward model")
    return batch_of([texts[i] for i in range(len(rollouts))], [()] * len(texts), range(len(texts)))


def _shared_out(rollouts: Rollouts, world: World) -> Sequence[int]:
    """Choose the rollouts whose texts this rank encodes, among those that it has the tokens of."""
    if rollouts.holders is None:
        return range(world.rank, len(rollouts), world.size)
    here = [i for i, rollout in enumerate(rollouts) if isinstance(rollout.response, Tokens)]
    return here if rollouts.holders.gives else []


def _check_lengths(batch: Batch, rollouts: Rollouts, run: Run, judge: Judge) -> None:
    batching, longest = run.config.reward_model, int(batch.lengths.max())
    limits = {"its positions": judge.arch.max_position_embeddings}
    if batching.use_dynamic_bsz:
        limits["reward_model.ppo_max_token_len_per_gpu"] = batching.most_tokens(batching.megatron)
    for name, limit in limits.items():
        if longest > limit:
            source = rollouts[int(batch.lengths.argmax())].prompt.source
            raise RewardError(
                f"{source}: prompt and response have {longest} tokens for the reward model, more than {name} = {limit}"
            )

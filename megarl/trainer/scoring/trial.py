"""Tries the reward on reference answers, before a run takes any GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

from megarl.data.readers import value_or_none
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.parts import Part, functions_of
from megarl.rewards.pool import RewardPool
from megarl.rewards.results import Failure, Response, RewardError, Scored
from megarl.trainer.inputs import Inputs
from megarl.types import Prompt

SECONDS = 30.0
"""That the trial may take; in the run a call may take `reward.timeout`."""
_SPREAD = 64  # rows that are looked at for a reference answer

Results = list[Scored | Failure]


def try_reward(inputs: Inputs) -> tuple[str, ...]:
    """Score the reference answers of a few training rows as the run will score responses, and empty responses to them.

    Returns:
        lines for the start of the run: the scores, and what is suspicious. Empty where nothing can be tried: no row has
        a reference answer, or an environment, a reward model or a closure scores.

    Raises:
        ValueError: the reward fails for an answer, which would end the run at a response.
    """
    config, parts = inputs.config, functions_of(inputs.rewards)
    if not parts or config.environment.answers or not all(part.reward.named for part in parts):
        return ()
    prompts = _with_references(inputs.train_prompts, parts, config.reward.trial)
    if not prompts:
        return ()
    try:
        results = _scored(prompts, parts, inputs)
    except RewardError as e:
        raise ValueError(f"the reward cannot be called: {e}") from e
    if results is None:
        return (
            f"remark: the reward gave no score to {len(prompts)} reference answers within {SECONDS:g} s; in the run a "
            f"call may take reward.timeout = {config.reward.timeout:g} s",
        )
    references, empty = results
    _check(references, config.reward.on_error)
    of_empty = f"; on empty responses: {_shown(empty)}"
    line = f"reward on {len(prompts)} reference answers: {_shown(references)}{of_empty}"
    return (line, *_suspicious(references, empty))


def _with_references(rows: Sequence[Prompt], parts: Sequence[Part], count: int) -> list[Prompt]:
    """Return some of the rows that have a reference answer: of as many data sources as possible."""
    if not count:
        return []
    spread = [rows[i] for i in range(0, len(rows), max(1, len(rows) // _SPREAD))]
    usable = [
        prompt for prompt in spread if _reference(prompt) and any(p.applies_to(prompt.data_source) for p in parts)
    ]
    firsts = {prompt.data_source: prompt for prompt in reversed(usable)}
    others = [prompt for prompt in usable if firsts[prompt.data_source] is not prompt]
    return [*firsts.values(), *others][:count]


def _reference(prompt: Prompt) -> str:
    """Return the reference answer of a row, as a response would give it; empty if there is none."""
    answer = prompt.row.get("answer")
    return str(answer).strip() if isinstance(answer, str | int | float) and not isinstance(answer, bool) else ""


def _scored(prompts: Sequence[Prompt], parts: Sequence[Part], inputs: Inputs) -> tuple[Results, Results] | None:
    """Score the reference and an empty response to each prompt, in that order; None if that takes too long.

    Raises:
        RewardError: the processes that call the functions do not start, or end.
    """
    settings, cores = inputs.config.reward, len(os.sched_getaffinity(0))
    one_try = settings.model_copy(update={"on_error": "drop"})  # all results, without pauses before further tries
    workers = min(2 * len(prompts), settings.workers or cores, cores)
    with ThreadPoolExecutor(1) as thread, closing(RewardPool(parts, one_try, workers)) as pool:
        for i, prompt in enumerate(prompts):
            for is_empty, text in ((False, _reference(prompt)), (True, "")):
                response = Response(
                    text=text,
                    tokens=_tokens(text, inputs.tokenizer),
                    prompt=value_or_none(prompt.row, inputs.config.data.prompt_key),
                )
                pool.submit((is_empty, i), response, prompt, prompt.data_source)
        collected = thread.submit(pool.collect)
        done, _ = wait([collected], SECONDS)
        if not done:
            return None
    results = collected.result()
    references, empty = ([results[is_empty, i] for i in range(len(prompts))] for is_empty in (False, True))
    return references, empty


def _tokens(text: str, tokenizer: Tokenizer) -> int:
    """Return how many tokens a response has, with its end token."""
    try:
        return len(tokenizer.encode(text)) + 1
    except ValueError:  # the tokenizer makes a special token of it, which no response is decoded from
        return 1


def _check(results: Results, on_error: str) -> None:
    """Raise ValueError where the run would end at such a result."""
    failures = [result for result in results if isinstance(result, Failure) and not result.left_out]
    if failures and (on_error == "fail" or len(failures) == len(results)):
        first, place = failures[0], failures[0].frames.strip().splitlines()
        at = next((f" ({line.strip()})" for line in reversed(place) if line.lstrip().startswith("File ")), "")
        raise ValueError(
            f"a reference answer cannot be scored: {first.reason}{at}; change the reward or the row, or leave the "
            "trial out with reward.trial=0"
        )


def _suspicious(references: Results, empty: Results) -> tuple[str, ...]:
    lines = []
    if failures := [result for result in (*references, *empty) if isinstance(result, Failure) and not result.left_out]:
        lines.append(f"remark: {len(failures)} calls of the reward failed; the first: {failures[0].reason}")
    pairs = [
        (reference.score, without.score)
        for reference, without in zip(references, empty, strict=True)
        if isinstance(reference, Scored) and isinstance(without, Scored)
    ]
    if pairs and all(reference <= without for reference, without in pairs):
        lines.append(
            "remark: no reference answer scores more than an empty response; if responses are to look like reference "
            "answers, look at the reward, its arguments and data.answer_key"
        )
    return tuple(lines)


def _shown(results: Results) -> str:
    return " ".join("-" if isinstance(result, Failure) else f"{round(result.score, 4)}" for result in results)

"""Scores a mathematical answer: 1 if it equals the reference, as the library math-verify reads both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.evaluation.answers import last_boxed
from megarl.isolation.launch import Isolation
from megarl.rewards.latex_number import same_number
from megarl.rewards.math_answer import Answer, answer_from, is_one_answer, is_readable, last_value
from megarl.rewards.outsiders import check_outsiders, outsider, score_of, start_early
from megarl.rewards.registry import register
from megarl.rewards.rows import answer_of, check_answer
from megarl.workers.deadline import seconds_left

_LONGEST_REFERENCE = 20_000


_process = partial(outsider, "megarl.rewards.outside.mathematics:answer", ("math-verify[antlr4_13_2]",))


def _check_args(*, boxed_only: bool, loose: bool, timeout: float, isolation: Isolation) -> None:
    import importlib.util

    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("needs the package math-verify: pip install math-verify[antlr4_13_2]")
    check_outsiders(timeout, isolation)


def _check_row(row: Mapping[str, Any]) -> None:
    check_answer(row)
    _reference(row)


def _reference(row: Mapping[str, Any]) -> tuple[str, Answer]:
    """Return the row's reference as it is written, and as an answer."""
    text = answer_of(row)
    boxed = last_boxed(text, outermost=True)
    inner = (text if boxed is None else boxed).strip()
    answer = answer_from(inner, _LONGEST_REFERENCE)
    if answer is None:
        raise ValueError(f"finds nothing mathematical in the row's answer {text!r:.80}")
    return inner, answer


@register("math_verify", check_row=_check_row, check_args=_check_args, prepare=partial(start_early, _process))
def math_verify(
    response: str,
    row: Mapping[str, Any],
    *,
    boxed_only: bool = False,
    loose: bool = False,
    timeout: float = 5.0,
    isolation: Isolation = "namespaces",
) -> float:
    """Compare values: fractions, decimals, sets, intervals, equations, units; `row` has a reference `answer`.

    The last `\\boxed{...}` of the response counts, with the braces in it; without one, the first value after "answer
    is", or the last of the text. It scores 1 if it is one answer of the reference's kind, and equal:

    - as many answers as the reference gives, "x = 5" for 5, and no chain of equations;
    - for a number a number: 1,234.5, \\frac{1}{2}, 1.5\\times10^{3}, with a unit that is not another one;
      no product, sum, power, root or factorial that was not worked out, and no fraction for a whole number;
    - for an expression what math-verify finds equal; with \\sum, \\int, \\binom or "!" only if the reference has it.

    Numbers and words are compared here; all else by the library in a sandbox, as programs of `reward.name=code` are. A
    response that takes it longer than `timeout`, or more than 4 GiB, scores 0.

    Args:
        boxed_only: a response without `\\boxed` scores 0.
        loose: whatever the library finds equal scores 1: 17\\cdot 23 for 391, 500\\% for 5, 6=5 for 5.
        timeout: seconds for one comparison.
        isolation: "process" has no sandbox, and the library has your files and your network: unsafe.

    Raises:
        ValueError: the row's answer holds nothing mathematical.
    """
    written, reference = _reference(row)
    boxed = last_boxed(response, outermost=True)
    if boxed is None and boxed_only:
        return 0.0
    text = last_value(response) if boxed is None else boxed
    if text is None:
        return 0.0
    if text.strip() == written:
        return 1.0
    answer = answer_from(text, max(2_000, 2 * len(written)))
    if answer is None or not (loose or is_readable(answer, reference)):
        return 0.0
    if not loose and (known := _without_library(answer, reference)) is not None:
        return float(known)
    request = {"reference": reference.text, "response": answer.text}
    return score_of(_process(isolation).ask(request, timeout=min(timeout, seconds_left() / 2))) or 0.0


def _without_library(answer: Answer, reference: Answer) -> bool | None:
    """Tell whether answer and reference are equal, if that needs no library; None if the library is to say."""
    if answer.shown == reference.shown:
        return True
    if reference.time is not None or answer.time is not None:
        return _same_time(answer, reference)
    if reference.based is not None and (reference.based[1] or (answer.based is not None and answer.based[1])):
        digits, base = reference.based
        return (
            answer.based is not None and answer.based[0] == digits and answer.based[1] in ("", base or answer.based[1])
        )
    if reference.compound is not None:
        return answer.compound == reference.compound
    if reference.number is not None:
        return answer.number is not None and same_number(answer.number, reference.number)
    if reference.words is not None:
        return answer.words is not None and answer.words.casefold() == reference.words.casefold()
    if not is_one_answer(answer, reference):
        return False
    if reference.relations == reference.items > 1 and not answer.relations and None not in reference.values:
        return _same_values(answer, reference)  # "2, 1" for "a = 2, b = 1": names have an order
    return None


def _same_time(answer: Answer, reference: Answer) -> bool:
    if answer.time is None or reference.time is None:
        return False
    *clock, half = answer.time
    return clock == list(reference.time[:2]) and half in ("", reference.time[2] or half)


def _same_values(answer: Answer, reference: Answer) -> bool:
    if len(answer.values) != len(reference.values):
        return False
    pairs = zip(answer.values, reference.values, strict=True)
    return all(a is not None and b is not None and same_number(a, b) for a, b in pairs)

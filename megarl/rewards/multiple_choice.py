"""1 for the letter of the right choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.evaluation.answers import last_boxed
from megarl.rewards.registry import register
from megarl.rewards.rows import answer_of, check_answer


def _check_args(*, choices: str) -> None:
    if not choices.isalpha() or not choices.isupper() or len(set(choices)) != len(choices):
        raise ValueError(f"choices = {choices!r} must be different capital letters, such as ABCD")


def _check_row(row: Mapping[str, Any], *, choices: str) -> None:
    check_answer(row)
    _reference(answer_of(row), choices)


@register("multiple_choice", check_row=_check_row, check_args=_check_args)
def multiple_choice(response: str, row: Mapping[str, Any], *, choices: str = "ABCD") -> float:
    """Compare the letter that a response chooses with the answer's.

    Its choice is the first of these that it has, and the last of that kind: `\\boxed{B}`; `<answer>B</answer>`;
    "answer is (B)" or "Answer: B"; "B", "(B)" or "B." and nothing else. "The answer is A or B" chooses none.

    `row` has a reference `answer`: the letter, or the number of the choice from 0.

    Args:
        choices: the letters, capitals; a response may use small ones in brackets or alone.

    Raises:
        ValueError: the row's answer is none of them.
    """
    return float(_choice(response, choices) == _reference(answer_of(row), choices))


def _reference(answer: str, choices: str) -> str:
    letter = answer.strip("().").upper()
    if letter.isdecimal() and int(letter) < len(choices):
        return choices[int(letter)]
    if len(letter) != 1 or letter not in choices:
        raise ValueError(f"needs one of the choices {choices} as the answer, or its number from 0, not {answer!r:.80}")
    return letter


def _choice(response: str, choices: str) -> str | None:
    letters = f"[{choices}{choices.lower()}]"
    response = " ".join(response.split())  # of thousands of blanks, each way to share them out would be tried
    boxed = last_boxed(response)
    if boxed is not None:
        inner = re.fullmatch(rf"\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{{)?\s*\(?({letters})\)?\.?\s*\}}?\s*", boxed)
        return inner[1].upper() if inner else None
    for pattern in (
        rf"<answer>\s*\(?({letters})\)?\.?\s*</answer>",
        rf"(?i:answer)(?:\s+is)?\s*:?\s*(?:\*\*)?\s*(?:\(({letters})\)|([{choices}])(?![\w']))",
    ):
        last = max(re.finditer(pattern, response), key=re.Match.end, default=None)
        if last is not None:
            several = re.compile(rf"[).*]*\s*(?:[,;/&+]|or\b|and\b)?\s*(?:\(?[{choices}](?![\w'])|\({letters}\))")
            return None if several.match(response, last.end()) else "".join(filter(None, last.groups())).upper()
    alone = re.fullmatch(rf"\s*\(?({letters})[).]?\s*", response)
    return alone[1].upper() if alone else None

"""Scores the letter of a choice: 1 for the right one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.evaluation.answers import last_boxed
from megarl.rewards.registry import register
from megarl.rewards.rows import answer_of, check_answer

_BOLD = r"(?:\*\*)?\s*"
_SHORT = 60  # characters of a response that is a choice: a longer one may go through all of them


def _check_args(*, choices: str) -> None:
    if not choices.isalpha() or not choices.isupper() or len(set(choices)) != len(choices):
        raise ValueError(f"choices = {choices!r} must be different capital letters, such as ABCD")


def _check_row(row: Mapping[str, Any], *, choices: str) -> None:
    check_answer(row)
    _reference(answer_of(row), choices)


@register("multiple_choice", check_row=_check_row, check_args=_check_args)
def multiple_choice(response: str, row: Mapping[str, Any], *, choices: str = "ABCD") -> float:
    """Compare the letter that a response chooses with the answer's.

    Its choice is the first of these that it has, and the last of that kind: `\\boxed{B}`; `<answer>B. Paris</answer>`;
    "answer is (B)", "option B" or "Answer: B"; "B", "(B)" or "B. Paris" and nothing before. "The answer is A or B"
    chooses none.

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
        return _alone(boxed, letters)
    tagged = max(re.finditer(r"<answer>(.{0,400}?)</answer>", response), key=re.Match.end, default=None)
    another = rf"(?:\(?[{choices}](?![\w'])|\({letters}\))"
    link = r"\s*(?:[,;/&+]|or\b(?:\s+option)?|and\b(?:\s+option)?)\s*"
    if tagged is not None:
        return None if re.compile(link + another).match(response, tagged.end()) else _alone(tagged[1], letters)
    phrase = rf"(?<!wrong )(?<!incorrect )(?i:answer|option|choice)\**(?:\s+is)?\s*:?\s*{_BOLD}(?i:option |choice )?"
    pattern = rf"{phrase}(?:\(({letters})\)|([{choices}])(?![\w']))"
    last = max(re.finditer(pattern, response), key=re.Match.end, default=None)
    if last is None:
        return _alone(response, letters) if len(response) <= _SHORT else None
    withdrawn = re.compile(rf"[).*]*\s*(?:{link}{another}|\(?[{choices}](?![\w' ])|is (?:not|wrong|incorrect|false))")
    return None if withdrawn.match(response, last.end()) else "".join(filter(None, last.groups())).upper()


def _alone(text: str, letters: str) -> str | None:
    """Find the letter that a text is, or begins with as in a list: "(B)", "**B**", "B. Paris", "\\textbf{(B)}\\ 5"."""
    begin = rf"\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{{)*\s*{_BOLD}"
    letter = rf"(?:\(({letters})\)|({letters})(?=[).:}}* ]*$|[).:}}]))"
    match = re.fullmatch(rf"{begin}{letter}(.*)", text)
    if match is None or re.search(rf"(?:\(|\bor |\band |[,;/]\s*){letters}(?![\w'])", match[3]):
        return None
    return (match[1] or match[2]).upper()

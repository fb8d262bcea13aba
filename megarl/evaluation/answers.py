"""Finds the answer in a response, for the votes of maj@k. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable

AnswerOf = Callable[[str], "str | None"]
"""Maps a response to its answer, or None. A reward function can have such a function as attribute `answer_of`."""

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_IS = re.compile(r"(?:final\s+)?answer(?:\s+is\s*:?|\s*[:=])", re.IGNORECASE)
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def answer_in(response: str) -> str | None:
    """Extract and normalise a response's answer; None if it is empty.

    The answer is the last `\\boxed{...}`; or else the last `<answer>...</answer>`; or else the rest of the line after
    the last `####`; or else the end of the last non-blank line, after "answer is" or "answer:" if the line has that.
    "6*7\\nThe answer is: $42$." gives "42".
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return normalised(boxed)
    before, closing, _ = response.rpartition("</answer>")
    _, opening, tagged = before.rpartition("<answer>")
    if closing and opening:
        return normalised(tagged)
    _, mark, after = response.rpartition("####")
    if mark and after.strip():
        return normalised(after.strip().splitlines()[0])
    last = next((line for line in reversed(response.splitlines()) if line.strip()), "")
    return normalised(_ANSWER_IS.split(last)[-1])


def normalised(answer: str) -> str | None:
    """Remove case, extra blanks, dollar signs, thousands' commas and a final full stop; None if nothing is left."""
    text = " ".join(_COMMA.sub("", answer).replace("$", "").split())
    return text.removesuffix(".").strip().casefold() or None


def last_boxed(text: str, *, outermost: bool = False) -> str | None:
    """Return the content of the last `\\boxed{...}` whose braces close; None if there is none.

    "\\boxed{1} so \\boxed{\\frac{1}{2}}" gives "\\frac{1}{2}". "\\boxed{6 \\boxed{5}}" gives "5", or with `outermost`
    "6 \\boxed{5}".
    """
    start, end = -1, -1
    open_braces: list[tuple[int, bool]] = []  # (position, whether the brace is a box's)
    for token in _TOKEN.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            open_braces.append((token.end(), token[0] != "{"))
        elif token[0] == "}" and open_braces:
            opening, boxed = open_braces.pop()
            if boxed and (outermost or opening > start):
                start, end = opening, token.start()
    return text[start:end] if start >= 0 else None

"""The answer that a response gives, as the votes of maj@k are counted. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable

AnswerOf = Callable[[str], "str | None"]
"""Response -> its answer; None: it gives none. A reward function can have one as its attribute `answer_of`."""

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_SAID = re.compile(r"(?:final\s+)?answer(?:\s+is\s*:?|\s*[:=])", re.IGNORECASE)
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def answer_in(response: str) -> str | None:
    """The last `\\boxed{...}`; or else the last `<answer>...</answer>`; or else what follows the last `####` in its
    line; or else the last line that is not blank, from "answer is" or "answer:" on. Normalised; None if that is empty.

    "6*7\\nThe answer is: $42$." gives "42".
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return normalised(boxed)
    before, closed, _ = response.rpartition("</answer>")
    _, opened, tagged = before.rpartition("<answer>")
    if closed and opened:
        return normalised(tagged)
    _, hashed, after = response.rpartition("####")
    if hashed and after.strip():
        return normalised(after.strip().splitlines()[0])
    last = next((line for line in reversed(response.splitlines()) if line.strip()), "")
    return normalised(_SAID.split(last)[-1])


def normalised(answer: str) -> str | None:
    """Without case, blanks, dollar signs, thousands' commas and a full stop at the end; None if nothing is left."""
    text = " ".join(_COMMA.sub("", answer).replace("$", "").split())
    return text.removesuffix(".").strip().casefold() or None


def last_boxed(text: str, *, outermost: bool = False) -> str | None:
    """What the last `\\boxed{...}` holds; None without one. One whose braces do not close is none.

    "\\boxed{1} so \\boxed{\\frac{1}{2}}" holds "\\frac{1}{2}". Of "\\boxed{6 \\boxed{5}}" it is "5", or with
    `outermost` "6 \\boxed{5}".
    """
    start, end = -1, -1
    open_braces: list[tuple[int, bool]] = []  # where it is, whether it is a box's
    for token in _TOKEN.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            open_braces.append((token.end(), token[0] != "{"))
        elif token[0] == "}" and open_braces:
            opening, boxed = open_braces.pop()
            if boxed and (outermost or opening > start):
                start, end = opening, token.start()
    return text[start:end] if start >= 0 else None

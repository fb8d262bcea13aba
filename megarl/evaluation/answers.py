"""The answer that a response gives, as the votes of maj@k are counted. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable

AnswerOf = Callable[[str], "str | None"]
"""Response -> its answer; None: it gives none. A reward function can have one as its attribute `answer_of`."""

_SAID = re.compile(r"(?:final\s+)?answer(?:\s+is\s*:?|\s*[:=])", re.IGNORECASE)
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def answer_in(response: str) -> str | None:
    """The last `\\boxed{...}`; or else the last `<answer>...</answer>`; or else what follows the last `####` in its
    line; or else the last line that is not blank, from "answer is" or "answer:" on. Normalised; None if that is empty.

    "6*7\\nThe answer is: $42$." gives "42".
    """
    boxed = _last_boxed(response)
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


def _last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` whose braces close holds."""
    opened: list[tuple[int, bool]] = []
    best: tuple[int, int] | None = None
    for found in re.finditer(r"\\boxed\{|\{|\}", text):
        if found[0] != "}":
            opened.append((found.end(), found[0] != "{"))
        elif opened:
            start, boxed = opened.pop()
            if boxed and (best is None or start > best[0]):
                best = (start, found.start())
    return None if best is None else text[best[0] : best[1]]

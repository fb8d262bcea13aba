"""What of a response is its mathematical answer, and whether that is an answer of the reference's kind. Torch-free.

The grammar stands in front of math-verify, which evaluates whatever it can read: a sum, an integral, the last part of a
chain of equations, any of several answers. What is let through is made of listed commands and characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from megarl.rewards.latex_number import Number, number_in, without_name

_LONGEST = 2_000  # characters; of an answer to a longer reference, twice as many
_AS_ASCII = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty "},
        **{"°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "∈": r"\in ", "√": r"\sqrt "},
        **{"½": r"\frac12 ", "±": r"\pm ", "∅": r"\emptyset ", "\u00a0": " "},
    }
)
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|quad|qquad)(?![A-Za-z])|(?<!\\)\\[,;:! ]|~"
)
_SMALL_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit|mathrm|text|textbf)\s*\{\s*([-+]?\d[\d,.]*|[A-Za-z])\s*\}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|textrm|mathbf|mbox|operatorname)\s*\{([A-Za-z0-9 ,.'()\-/]*)\}")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z][A-Za-z .'\-]*")
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w+\}|\w))?(?:\([A-Za-z](?:,\s*[A-Za-z])*\))?'?")
_RELATION = re.compile(r"=|<|>|\\(?:leq?|geq?|lt|gt|neq?|approx|equiv|sim|in|leqslant|geqslant)(?![A-Za-z])")
_SEPARATOR = re.compile(r"[,;]|\\(?:text|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_STRUCTURE = re.compile(
    r"\\(?:begin|end)\s*\{[a-z]+\}|\\(?:cup|cap|setminus)(?![A-Za-z])|\\\\|\\[{}]|[()\[\]&,;|]|\\pm(?![A-Za-z])|"
    + _RELATION.pattern
    + "|"
    + _SEPARATOR.pattern
)
_ENDLESS = re.compile(r"[-+]?\s*(?:\\infty|infinity|\\emptyset|\\varnothing|\\mathbb\s*\{?[A-Z]\}?|[A-Za-z])?")
_ALLOWED_NAMES = r"""
frac sqrt pi infty cdot times div cup cap setminus text mathrm textbf textit textrm mathbf mbox operatorname circ degree
begin end le ge leq geq leqslant geqslant lt gt ne neq in sim pm mid mathbb emptyset varnothing ln log exp sin cos tan
sec csc cot arcsin arccos arctan sinh cosh tanh alpha beta gamma delta epsilon varepsilon zeta eta theta lambda mu nu xi
rho sigma tau phi varphi psi omega Delta Theta Phi Omega vec hat overline angle triangle langle rangle lvert rvert prime
{ } % $ \ |
"""
_ALLOWED = frozenset(_ALLOWED_NAMES.split())
_DERIVATIVE = re.compile(r"\\frac\s*\{?\s*d(?![A-Za-z])|(?<![A-Za-z])d\s*/\s*d")
_ENVIRONMENTS = frozenset({"pmatrix", "bmatrix", "vmatrix", "Bmatrix", "matrix", "array", "cases"})


@dataclass(frozen=True)
class Answer:
    """A text that may be a mathematical answer, without what is layout alone."""

    text: str

    @cached_property
    def number(self) -> Number | None:
        """Its value, if it is a plain number."""
        return number_in(self.text)

    @cached_property
    def words(self) -> str | None:
        """Its text, if it is one of letters and no formula: "Evelyn", "\\text{(B)}", "no"."""
        plain = " ".join(_TEXT.sub(r"\1", self.text).replace("\\ ", " ").split()).strip("(). ")
        return plain if _WORDS.fullmatch(plain) else None

    @cached_property
    def items(self) -> int:
        """How many answers it gives: 2 for "1, 2", "1 or 2", "\\{1, 2\\}" and "\\pm 1"; 1 for "(1, 2)"."""
        inner = self.text
        if inner.startswith("\\{") and inner.endswith("\\}"):
            inner = inner[2:-2]
        depth, count = 0, 1
        for token in re.finditer(r"\\[{}]|[(\[{]|[)\]}]|" + _SEPARATOR.pattern, inner):
            if token[0] in ("(", "[", "{", "\\{"):
                depth += 1
            elif token[0] in (")", "]", "}", "\\}"):
                depth -= 1
            elif depth == 0:
                count += 1
        return count + len(re.findall(r"\\pm(?![A-Za-z])", inner))

    @cached_property
    def relations(self) -> int:
        return len(_RELATION.findall(self.text))

    @cached_property
    def commands(self) -> frozenset[str]:
        return frozenset(_COMMAND.findall(self.text))

    @cached_property
    def is_plain(self) -> bool:
        """Whether its parts are numbers and letters alone: "(1, 2]", "x = 1, x = 2", a matrix of numbers."""
        return all(_ENDLESS.fullmatch(part.strip()) or number_in(part) for part in _STRUCTURE.split(self.text))


def answer_from(text: str, longest: int = _LONGEST) -> Answer | None:
    """The text as an answer; None if it is empty, longer, or holds characters that formulas do not have."""
    if len(text) > longest:
        return None
    text = text.translate(_AS_ASCII)
    if not all(" " <= character <= "~" or character in "\n\t" for character in text):
        return None
    text = _SMALL_FRACTION.sub(r"\\frac", _LAYOUT.sub(" ", text)).replace("{,}", ",").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if (text.startswith("\\(") and text.endswith("\\)")) or (text.startswith("\\[") and text.endswith("\\]")):
        text = text[2:-2]
    text = _BOLD.sub(lambda held: f" {held[1]} ", text)
    text = " ".join(re.sub(r"(?<=\d) +(?=\d{3}(?!\d))", "", text).split()).removesuffix(".").strip()
    return Answer(text) if re.search(r"[A-Za-z0-9]", text) else None


def is_readable(answer: Answer, reference: Answer) -> bool:
    """Whether it is made of the listed commands and environments, or the reference's, and so may be parsed."""
    environments = set(re.findall(r"\\begin\s*\{([^}]*)\}", answer.text))
    return (
        answer.commands <= _ALLOWED | reference.commands
        and environments <= _ENVIRONMENTS
        and not (set('!#@_`"?') - {"_"} & set(answer.text)) - set(reference.text)
        and "**" not in answer.text
        and (_DERIVATIVE.search(answer.text) is None or _DERIVATIVE.search(reference.text) is not None)
    )


def is_one_answer(answer: Answer, reference: Answer) -> bool:
    """Whether it gives as many answers as the reference, in its form, and each in a canonical one.

    "6 = 5" and "5, 6" are none for 5; "17 \\cdot 23" is none for 391, nor "(17 \\cdot 23, 1)" for (391, 1).
    """
    if answer.items != reference.items:
        return False
    if answer.relations > reference.relations and not _is_named(answer, reference):
        return False
    return answer.is_plain or not reference.is_plain


def _is_named(answer: Answer, reference: Answer) -> bool:
    """Whether each of its relations is a name's, "x = 1, y = 2", or describes an interval, "1 < x < 2"."""
    if reference.text[:1] in ("(", "[") or "\\cup" in reference.text:
        return "=" not in answer.text.replace("\\in", "") and answer.relations <= 2 * reference.items
    for part in _SEPARATOR.split(answer.text):
        sides = _RELATION.split(part)
        if len(sides) > 2 or (len(sides) == 2 and not _NAME.fullmatch(sides[0].strip())):
            return False
    return "<" not in answer.text and ">" not in answer.text and without_name(answer.text) != ""


# ------------------------------------------------------------------------------------------ where an answer stands

_SAID = re.compile(r"answer(?:\s+is\s*:?|\s*[:=])", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(([^\n]{1,2000}?)\\\)|\\\[([^\n]{1,2000}?)\\\]")
_NUMBER = re.compile(r"(?<![\w\\{}^.,/])[-+]?\$?(?:\d[\d,]*(?:\.\d+)?(?:/\d+)?|\.\d+)(?:\s?%)?(?![\w\\{}^/])")


def last_value(response: str) -> str | None:
    """Of a text without a box: the first formula or number after the last "answer is"; else the last of the text."""
    text = response[-20_000:]
    said = _SAID.split(text)
    if len(said) > 1 and (value := _first(said[-1][:400])) is not None:
        return value
    for pattern in (_FORMULA, _NUMBER):
        last = max(pattern.finditer(text), key=re.Match.end, default=None)
        if last is not None:
            return next((group for group in last.groups() if group is not None), last[0])
    return None


def _first(text: str) -> str | None:
    formula, number = _FORMULA.search(text), _NUMBER.search(text)
    if formula is not None and (number is None or formula.start() <= number.start()):
        return next(group for group in formula.groups() if group is not None)
    return number[0] if number is not None else None

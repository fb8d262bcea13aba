"""Finds the mathematical answer of a response, and whether it is of the reference's kind. Torch-free.

The grammar stands in front of math-verify, which evaluates whatever it can read: a sum, an integral, the last part of a
chain of equations, any of several answers. What is let through is made of listed commands and characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from megarl.rewards.latex_number import Number, number_in, unit_in, without_name

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
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})\s*\\!\s*(?=\d{3}(?!\d))")
_SMALL_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_ONE = r"(\\(?:pi|theta|alpha|beta)(?![A-Za-z])|[A-Za-z0-9])"  # what a command takes that no braces follow
_WITHOUT_BRACES = (
    (re.compile(rf"\\sqrt(?![A-Za-z])\s*(\[\w+\])?\s*{_ONE}"), r"\\sqrt\1{\2}"),
    (re.compile(rf"\\frac(?![A-Za-z])\s*{_ONE}"), r"\\frac{\1}"),
    (re.compile(rf"(\\frac\s*\{{[^{{}}]*\}})\s*{_ONE}"), r"\1{\2}"),
)
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit|mathrm|text|textbf)\s*\{\s*([-+]?\d[\d,.]*|[A-Za-z])\s*\}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|textrm|mathbf|mbox|operatorname)\s*\{([A-Za-z0-9 ,.'()\-/]*)\}")
_WORDED = re.compile(r"\\(?:text|mathrm|textbf|textit|textrm|mathbf|mbox|operatorname)(?![A-Za-z])")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z][A-Za-z .'\-]*")
_SHORT_WORDS = """
am an as at be by do go he hi if in is it me my no of oh ok on or ox pm so to up us we ad ah ax ay eh ex ha ho id la lo
ma pa pi uh um ya ye yo vs eg ie cm mm km kg mg ml ft lb oz hr ln
"""
_NO_PRODUCTS = frozenset({*_SHORT_WORDS.split(), "ii", "iv", "ix", "vi", "xi", "xv", "xx"})
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w+\}|\w))?(?:\([A-Za-z](?:,\s*[A-Za-z])*\))?'?")
_RELATION = re.compile(r"=|<|>|\\(?:leq?|geq?|lt|gt|neq?|approx|equiv|sim|in|leqslant|geqslant)(?![A-Za-z])")
_SEPARATOR = re.compile(r"[,;]|\\(?:text|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"(\d[0-9A-Za-z]{0,199})(?:_\s*(?:\{\s*(\d{1,2})\s*\}|(\d)))?")
_MEASURE = r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{2,12})\.?"
_COMPOUND = re.compile(rf"{_MEASURE}(?:,?\s*(?:and\s+)?{_MEASURE}){{1,3}}")
_CHOICE = re.compile(r"^\\(?:textbf|text|mathrm|mathbf)\s*\{\s*\([A-Z]\)\s*\}(?=\s*\S)")
_ONE_WORD = re.compile(r"^ ([A-Za-z])(?![A-Za-z])")
_ALL_TEXT = re.compile(r"\\(?:textbf|text|mathrm|mathbf|mbox)\s*\{\s*([-+]?\d[^{}]*)\}")
_TUPLE_NAMED = re.compile(r"\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])+)\s*\)\s*=\s*\(")
_STRUCTURE = re.compile(
    r"\\begin\s*\{array\}\s*\{[lcr| ]+\}|\\(?:begin|end)\s*\{[a-z]+\}|"
    r"\\(?:cup|cap|setminus)(?![A-Za-z])|\\\\|\\[{}]|[()\[\]&,;|]|\\pm(?![A-Za-z])|"
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
_DERIVATIVE = re.compile(
    r"\\frac\s*\{?\s*d(?![A-Za-z])|\\frac\s*\{\s*d.*\}\s*\{\s*d|(?<![A-Za-z])d\s*/\s*d"  # \frac{d}{dx}, \frac{dx^5}{dx}
)
_BETWEEN = re.compile(r"\\end\s*\{[a-z]+\}((?:(?!\\end).)*?)\\begin")
_ENVIRONMENTS = frozenset({"pmatrix", "bmatrix", "vmatrix", "Bmatrix", "matrix", "array", "cases"})


@dataclass(frozen=True)
class Answer:
    """Holds a text that may be a mathematical answer, without what is layout alone.

    Attributes:
        number: its value, if it is a plain number.
    """

    text: str
    number: Number | None

    @cached_property
    def shown(self) -> str:
        """Return the text as a reader sees it: "June 20" of "\\text{June 20}"."""
        words = " ".join(_TEXT.sub(r"\1", self.text).split())
        return re.sub(r" ?(\\\\|[-+<>=&]|\\(?:begin|end)\{[a-z]+\}) ?", r"\1", words)

    @cached_property
    def words(self) -> str | None:
        """Return the text, if it is letters and no formula: "Evelyn", "\\text{(B)}", "no"; not "x - y" nor "ab"."""
        plain = self.shown.strip("(). ")
        if "\\" not in self.text and _is_of_variables(plain):
            return None
        return plain if _WORDS.fullmatch(plain) else None

    @cached_property
    def items(self) -> int:
        """Count the answers that the text gives: 2 for "1, 2", "1 or 2", "\\{1, 2\\}" and "\\pm 1"; 1 for "(1, 2)"."""
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
    def time(self) -> tuple[int, int, str] | None:
        """Read the time of day, "4:30 PM", which the library takes for a fraction: hour, minute, "a", "p" or ""."""
        match = _TIME.fullmatch(self.shown)
        return None if match is None else (int(match[1]), int(match[2]), (match[3] or "").lower())

    @cached_property
    def based(self) -> tuple[str, str] | None:
        """Read digits and the base below them, "" without one: the library reads no base."""
        match = _BASE.fullmatch(self.text)
        base = "" if match is None else match[2] or match[3] or ""
        if match is None or (base and not 1 < int(base) < 37):
            return None
        if base and any(int(digit, 36) >= int(base) for digit in match[1]):
            return None
        return match[1], base

    @cached_property
    def compound(self) -> list[tuple[str, str]] | None:
        """Read two or more measures that are one, "5 feet 6 inches", of which the library reads the first."""
        return re.findall(_MEASURE, self.shown.lower()) if _COMPOUND.fullmatch(self.shown) else None

    @cached_property
    def unit(self) -> str:
        """Read the unit at the end of an expression; "": none."""
        word = _WORDED.search(self.text) or re.search(r" [A-Za-z](?:\s*\^\s*\{?\d\}?)?$", self.text)
        return (unit_in(_ONE_WORD.sub(r"\\text{\1}", self.text[word.start() :])) or "") if word is not None else ""

    @cached_property
    def values(self) -> list[Number | None]:
        """Read the numbers that the answer's parts are, in their order."""
        return [number_in(part) for part in _SEPARATOR.split(self.text)]

    @cached_property
    def relations(self) -> int:
        return len(_RELATION.findall(self.text))

    @cached_property
    def environments(self) -> int:
        return len(re.findall(r"\\begin(?![A-Za-z])", self.text))

    @cached_property
    def commands(self) -> frozenset[str]:
        return frozenset(_COMMAND.findall(self.text))

    @cached_property
    def is_plain(self) -> bool:
        """Tell whether the answer has numbers and letters alone: "(1, 2]", "x = 1, x = 2", a matrix of numbers."""
        if any(not _SEPARATOR.fullmatch(between.strip(" ()[]")) for between in _BETWEEN.findall(self.text)):
            return False
        if re.search(r"\\overline|\d \d", self.text):  # the library reads no 0.\overline{3}, and 4 1/2 as a product
            return False
        return all(_ENDLESS.fullmatch(part.strip()) or number_in(part) for part in _STRUCTURE.split(self.text))


def _is_of_variables(text: str) -> bool:
    """Tell whether a text is a difference or a product of variables: "x - y", "ab", "xyz"."""
    parts = [part.strip() for part in text.split("-")]
    return len(text) > 1 and all(len(part) == 1 or _is_product(part) for part in parts)


def _is_product(text: str) -> bool:
    """Tell whether a text is two letters that are no word, or three that follow each other in the alphabet."""
    if len(text) == 2:
        return text.isalpha() and text.islower() and text not in _NO_PRODUCTS
    return len(text) == 3 and text in _ALPHABET


def answer_from(text: str, longest: int = _LONGEST) -> Answer | None:
    """Read a text as an answer; None if it is empty, too long, or holds characters that formulas do not have."""
    if len(text) > longest:
        return None
    text = text.translate(_AS_ASCII)
    if not all(" " <= character <= "~" or character in "\n\t" for character in text):
        return None
    text = _THOUSANDS.sub("", text).replace(r"\varnothing", r"\emptyset")
    text = _SMALL_FRACTION.sub(r"\\frac", _LAYOUT.sub(" ", text)).replace("{,}", ",").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if (text.startswith("\\(") and text.endswith("\\)")) or (text.startswith("\\[") and text.endswith("\\]")):
        text = text[2:-2]
    text = _CHOICE.sub("", text)
    if (whole := _ALL_TEXT.fullmatch(text)) is not None:
        text = whole[1]
    with_units = _tidy(text)
    text = _tidy(_BOLD.sub(lambda match: f" {match[1]} ", text))
    if not re.search(r"[A-Za-z0-9]", text):
        return None
    number = number_in(with_units) or number_in(text)
    text = re.sub(r"(?<=\d) (?=[A-Za-z]$)", "", text)
    for pattern, braced in _WITHOUT_BRACES:
        text = pattern.sub(braced, text)
    return Answer(text=text, number=number)


def _tidy(text: str) -> str:
    return " ".join(re.sub(r"(?<=\d) +(?=\d{3}(?!\d))", "", text).split()).removesuffix(".").strip()


def is_readable(answer: Answer, reference: Answer) -> bool:
    """Tell whether an answer has only the listed commands and environments, or the reference's, and may be parsed."""
    environments = set(re.findall(r"\\begin\s*\{([^}]*)\}", answer.text))
    return (
        answer.commands <= _ALLOWED | reference.commands
        and environments <= _ENVIRONMENTS
        and not (set('!#@_`"?') - {"_"} & set(answer.text)) - set(reference.text)
        and "**" not in answer.text
        and _is_balanced(answer.text)
        and (_DERIVATIVE.search(answer.text) is None or _DERIVATIVE.search(reference.text) is not None)
    )


def _is_balanced(text: str) -> bool:
    """Tell whether each brace is closed: what follows a closing one too many is not read."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def is_one_answer(answer: Answer, reference: Answer) -> bool:
    """Tell whether an answer gives as many values as the reference, in its form, and each in a canonical one.

    "6 = 5" and "5, 6" are no answers for 5; "17 \\cdot 23" is none for 391, nor "(17 \\cdot 23, 1)" for (391, 1).
    """
    if answer.items != reference.items or answer.environments > reference.environments:
        return False
    if not _has_no_words(answer):
        return False
    if reference.items == 1 and answer.text.startswith("\\{") and not reference.text.startswith("\\{"):
        return False  # a set of one is not the one
    if answer.relations > reference.relations and not _is_named(answer, reference):
        return False
    if answer.unit and reference.unit and answer.unit != reference.unit:
        return False
    return answer.is_plain or not reference.is_plain


def _has_no_words(answer: Answer) -> bool:
    """Tell whether an answer has no words but "and", "or", and a unit at its end: what follows words is not read."""
    text = _SEPARATOR.sub(",", answer.text)
    word = _WORDED.search(text)
    return word is None or unit_in(text[word.start() :]) is not None


def _is_named(answer: Answer, reference: Answer) -> bool:
    """Tell whether each relation of an answer is a name's, "x = 1, y = 2", or describes an interval, "1 < x < 2"."""
    tuple_named = _TUPLE_NAMED.match(answer.text)
    if tuple_named is not None and answer.relations == 1:
        names = re.findall("[A-Za-z]", tuple_named[1])
        return names == sorted(set(names))  # of (y, x) = (1, 2) the reference may be (2, 1)
    if reference.text[:1] in ("(", "[") or "\\cup" in reference.text:
        return "=" not in answer.text.replace("\\in", "") and answer.relations <= 2 * reference.items
    for part in _SEPARATOR.split(answer.text):
        sides = _RELATION.split(part)
        if len(sides) > 2 or (len(sides) == 2 and not _NAME.fullmatch(sides[0].strip())):
            return False
    return "<" not in answer.text and ">" not in answer.text and without_name(answer.text) != ""


# ------------------------------------------------------------------------------------------ where an answer stands

_PHRASE = re.compile(r"answer(?:\s+is\s*:?(?!\s*not\b)|\s*[:=])", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(([^\n]{1,2000}?)\\\)|\\\[([\s\S]{1,2000}?)\\\]")
_NUMBER = re.compile(r"(?<![\w\\{}^.,/])[-+]?\$?(?:\d[\d,]*(?:\.\d+)?(?:/\d+)?|\.\d+)(?:\s?%)?(?![\w\\{}^/])")


def last_value(response: str) -> str | None:
    """Find the answer of a text without a box: the first formula or number after the last "answer is", or the last."""
    text = response[-20_000:]
    parts = _PHRASE.split(text)
    if len(parts) > 1 and (value := _first(parts[-1][:400])) is not None:
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

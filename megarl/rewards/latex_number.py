"""Reads numbers as people write them in LaTeX, and compares their values without computer algebra. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,333}|\d{1,1000})"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d{{0,1000}})?|\.\d{{1,1000}})"
_PART = r"(?:\{\s*([-+]?\s*\d{1,1000}(?:\.\d{1,1000})?)\s*\}|(\d))"
_FORMS = {
    "mixed": re.compile(rf"(\d{{1,100}})\s*\\frac\s*{_PART}\s*{_PART}"),
    "fraction": re.compile(rf"\\frac\s*{_PART}\s*{_PART}"),
    "mixed ratio": re.compile(r"(\d{1,100})\s+(\d{1,100})\s*/\s*(\d{1,100})"),
    "repeating": re.compile(r"(\d{0,100})\.(\d{0,100})\s*\\overline\s*\{\s*(\d{1,100})\s*\}"),
    "ratio": re.compile(r"(\d{1,1000})\s*/\s*(\d{1,1000})"),
    "scientific": re.compile(
        rf"(?:({_DECIMAL})\s*(?:\\times|\\cdot)\s*)?10\s*\^\s*(?:\{{\s*([-+]?\d{{1,3}})\s*\}}|(\d))"
    ),
    "decimal": re.compile(_DECIMAL),
}
_SIGN = re.compile(r"\s*([-+]?)\s*(\\?\$)?\s*")
_LETTER = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w+\}|\w))?"
_NAMED = re.compile(  # x, f(2), P(X = 1), AB, m + n, \text{area}
    rf"\s*(?:{_LETTER}(?:\s*\([A-Za-z0-9=., ]{{1,20}}\))?|[A-Z]{{2,3}}|[a-z](?:\s*[-+]\s*[a-z]){{1,3}}|"
    r"\\text\s*\{[A-Za-z ]{1,30}\})\s*(?:=|\\in(?![a-z]))\s*"
)
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\circ|\\degree)\s*")
_UNIT = re.compile(
    r"\s*(?:\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{([A-Za-z /.\-]{1,60})\}"
    r"|((?:cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr|mph|(?<=\s)[A-Za-z]{3,20}(?: [A-Za-z]{3,20}){0,3})))"
    r"(?:\s*\^\s*(?:\{\s*([-+]?[123])\s*\}|([123])))?\s*"
)
_NO_UNIT_WORDS = """
and or not no none never wrong incorrect false if is to by plus minus times over less more than divided mod half third
quarter squared cubed factorial percent pct hundred thousand million billion trillion dozen dozens score zero one two
tenths hundredths thousandths millionths billionths trillionths halves thirds quarters fifths pair pairs twice thrice
tens hundreds thousands millions billions trillions
three four five six seven eight nine ten eleven twelve twenty sin cos tan log sqrt exp i e x y z n k
"""
_UNITS_OF_ONE_LETTER = frozenset("mgshAVWJNCFLl")
_NO_UNIT = frozenset(_NO_UNIT_WORDS.split())
_CENTS, _DOLLARS = {"cent", "cents"}, {"dollar", "dollars", "usd", "us dollars"}
_ROUNDED = Fraction(1, 2_000_000)  # a decimal and a fraction share six decimals, as math-verify compares them
_SIGNIFICANT = Fraction(1, 200_000)  # and six digits: 0 is no 1/3628800


@dataclass(frozen=True, kw_only=True)
class Number:
    """Holds a number, and how it is written.

    Attributes:
        form: "decimal" (whole ones, too), "fraction" or "scientific".
        percent: whether a percent sign follows; `value` is without it.
        unit: the words after it; "": none.
    """

    value: Fraction
    form: str
    percent: bool = False
    unit: str = ""


def without_name(text: str) -> str:
    """Leave out "x =", "f(2) =", "AB =" or "x \\in" at the beginning."""
    name = _NAMED.match(text)
    return text[name.end() :] if name else text


def number_in(text: str) -> Number | None:
    """Read the number that a text is, with a name, a sign, a currency, percent, degrees or a unit; None for other text.

    A sum, a product, a power or a factorial is no number, but for 1.5\\times10^{3}.
    """
    rest = without_name(text).strip()
    if rest.startswith("(") and rest.endswith(")"):
        rest = rest[1:-1]
    while rest.startswith("{") and rest.endswith("}"):
        rest = rest[1:-1].strip()
    sign = _SIGN.match(rest)
    assert sign is not None
    rest = rest[sign.end() :]
    for form, pattern in _FORMS.items():
        if (match := pattern.match(rest)) and (value := _value(form, match)) is not None:
            number = _with_tail(rest[match.end() :], -value if sign[1] == "-" else value, form)
            if number is not None and not (sign[2] and number.unit in _CENTS):
                return replace(number, unit=number.unit or "dollars") if sign[2] else number
    return None


def _value(form: str, match: re.Match[str]) -> Fraction | None:
    groups = [re.sub(r"[\s,]", "", group) for group in match.groups() if group is not None]
    if form == "decimal":
        return Fraction(match[0].replace(",", "").removesuffix("."))
    if form == "scientific":
        mantissa = Fraction(groups[0].removesuffix(".")) if match[1] is not None else Fraction(1)
        return mantissa * Fraction(10) ** int(groups[-1]) if 1 <= mantissa < 10 else None
    if form == "repeating":
        whole, fixed, repeated = match.groups()
        cycle = Fraction(int(repeated), 10 ** len(repeated) - 1)
        return int(whole or 0) + (int(fixed or 0) + cycle) / 10 ** len(fixed)
    above, below = Fraction(groups[-2]), Fraction(groups[-1])
    if not below:
        return None
    if form in ("mixed", "mixed ratio"):
        return int(groups[0]) + above / below if 0 < above < below else None
    return above / below


def _with_tail(tail: str, value: Fraction, form: str) -> Number | None:
    """Read what follows the digits; None if that is no percent sign, degrees or unit."""
    form = "fraction" if form in ("mixed", "mixed ratio", "ratio", "repeating") else form
    spaced, tail = tail[:1].isspace(), tail.strip()
    if tail in ("\\%", "%", "\\text{%}", "\\text{\\%}"):
        return Number(value=value, form=form, percent=True)
    if not tail or _DEGREES.fullmatch(tail):
        return Number(value=value, form=form)
    if re.fullmatch(r"(?:\\text\s*\{\s*)?(?:percent|pct)\s*\}?", tail, re.IGNORECASE):
        return Number(value=value, form=form, percent=True)
    unit = unit_in(f" {tail}" if spaced else tail)
    return None if unit is None else Number(value=value, form=form, unit=unit)


def unit_in(text: str) -> str | None:
    """Read the unit that a text is: "cm" of "\\text{ cm}", "m2" of "\\text{ m}^2"; None for anything else."""
    unit = _UNIT.fullmatch(text)
    if unit is None:
        return None
    written = (unit[1] or unit[2]).strip()
    words = written.lower().split()
    if len(written) == 1 and written not in _UNITS_OF_ONE_LETTER:
        return None
    if len(written) > 1 and (len(words) > 4 or _NO_UNIT & {word.strip(".") for word in words}):
        return None
    return " ".join(words) + (unit[3] or unit[4] or "")


def same_number(answer: Number, reference: Number) -> bool:
    """Tell whether an answer gives the reference's value.

    A fraction is no answer where the reference is whole: \\frac{10}{2} says what to divide. A percent sign is a unit
    ("50\\%" for 50), or a hundredth of what is at most 1 (for 0.5).
    """
    units = {answer.unit, reference.unit} - {""}
    if len(units) == 2 and not units <= _DOLLARS:
        return False
    whole = reference.value.denominator == 1 and not reference.percent and reference.form != "fraction"
    if answer.form == "fraction" and whole:
        return False
    if _equal(answer, reference, Fraction(1)):
        return True
    if answer.percent and not reference.percent and abs(reference.value) <= 1:
        return _equal(answer, reference, Fraction(1, 100))
    return reference.percent and not answer.percent and _equal(reference, answer, Fraction(1, 100))


def _equal(a: Number, b: Number, times: Fraction) -> bool:
    left, right = a.value * times, b.value
    if {a.form, b.form} == {"decimal", "fraction"}:
        return abs(left - right) <= min(_ROUNDED, abs(right) * _SIGNIFICANT)
    return left == right

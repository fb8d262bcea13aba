"""Mathematical answers: which are paid, and which only look like one."""

from __future__ import annotations

import pytest
from selection import quick

from megarl.evaluation.answers import last_boxed
from megarl.rewards import load_reward
from megarl.rewards.math_answer import last_value
from megarl.rewards.math_verify import math_verify

MATH = [
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
    (r"\boxed{1/3}", r"\frac{1}{3}", 1),
    (r"$$\boxed{-\frac{3}{4}}$$", "-0.75", 1),
    (r"\boxed{0.333}", r"\frac13", 0),
    (r"first \boxed{3}, no, \boxed{4}", "4", 1),
    (r"first \boxed{4}, no, \boxed{3}", "4", 0),
    ("The answer is 42", "42", 1),
    ("The answer is 41", "42", 0),
    (r"\boxed{7}", 7, 1),
    (r"\boxed{1.0}", "1", 1),
    (r"\boxed{1,234,567}", "1234567", 1),
    (r"\boxed{1\times10^{3}}", "1000", 1),
    (r"\boxed{(1,2]}", "(1,2]", 1),
    (r"\boxed{[1,2]}", "(1,2]", 0),
    (r"\boxed{(-\infty,3)\cup(5,\infty)}", r"(-\infty, 3) \cup (5, \infty)", 1),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", 1),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}", 0),
    (r"\boxed{(3,4)}", "(3, 4)", 1),
    (r"\boxed{(4,3)}", "(3,4)", 0),
    (r"\boxed{10\text{ cm}}", "10", 1),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{0.5}", r"50\%", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{3+2i}", "2i+3", 1),
    (r"\boxed{\pi}", "3.14", 0),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    (r"\boxed{\text{B}}", "B", 1),
    (r"\boxed{B}", "C", 0),
    (r"\boxed{\frac{1}{0}}", "5", 0),
    (r"\boxed{\frac{1}{2}}", r"so it is \boxed{\frac{2}{4}}", 1),
    (r"\boxed{\pi(R-r)(R+r)}", r"\pi(R^2-r^2)", 1),
    (r"\boxed{r^2}", "R^2", 1),
    (r"\boxed{a_1+2A}", "2A+a_1", 1),
    (r"\boxed{0}", "R^2-r^2", 0),
    (r"\boxed{\frac{r}{2}}", r"\frac{Rr}{R+r}", 0),
    (r"\boxed{3A}", "2A+a", 0),
    (r"\boxed{3a}", "2A+a", 0),
    (r"\boxed{r^2-R^2}", "R^2-r^2", 0),
    (r"\boxed{a=2A}", "A=2a", 0),
    (r"\boxed{2:5}", "12:30", 0),
    (r"\boxed{0.4}", "12:30", 0),
    (r"\boxed{12:30}", "12:30", 1),
    (r"\boxed{\{3\pi\}}", r"3\pi", 0),
    (r"\boxed{\{1, 2\}}", "1, 2", 1),
    ("", "5", 0),
    ("I do not know", "5", 0),
    (r"the answer is $\sqrt{2}}{\sqrt{3}$", r"\sqrt{2}", 0),
    (r"\boxed{}", "5", 0),
    (r"\boxed{5", "5", 0),
]


@pytest.mark.parametrize(("response", "answer", "score"), MATH)
def test_math_verify(response: str, answer: object, score: float) -> None:
    assert math_verify(response, {"answer": answer}) == score


@pytest.mark.parametrize(
    "expression",
    quick(
        [
            "9^{9^{9}}",
            r"\frac{1}{9^{9^{9}}}",
            "100000000!",
            r"\binom{100000000}{50000000}",
            "(" * 3000 + "1" + ")" * 3000,
        ],
        *(2, 4),
    ),
    ids=["power", "fraction", "factorial", "binomial", "brackets"],
)
def test_mathematics_without_end_scores_0_in_time(expression: str) -> None:
    for answer in ("0", r"\sqrt{2}+x", r"\binom{5}{2}+x!"):
        assert math_verify(rf"\boxed{{{expression}}}", {"answer": answer}, timeout=0.5) == 0.0
        assert math_verify(rf"\boxed{{x+{expression}}}", {"answer": answer}, timeout=0.5, loose=True) == 0.0
    assert math_verify(r"\boxed{\sqrt{8}}", {"answer": r"2\sqrt{2}"}, timeout=500) == 1.0


def test_only_boxed_answers_count() -> None:
    assert math_verify("it is 42", {"answer": "42"}, boxed_only=True) == 0.0
    assert math_verify(r"it is \boxed{42}", {"answer": "42"}, boxed_only=True) == 1.0


# fmt: off
HONEST = {
    "5": [
        "5", "+5", "05", "5.0", "5.", "$5$", "(5)", "{5}", r"\text{5}", r"\mathbf{5}", "x = 5", "n=5",
        "f(x)=5", "x_1 = 5", r"5\text{ apples}", "5 apples", "5cm", r"5\text{ cm}^2", r"5\ \mathrm{m/s}",
        r"\$5", r"\$5.00", r"5^\circ", " 5 ", r"5^{\circ}", "5 degrees", r"5\%", r"\displaystyle 5",
        r"\,5\,", r"\(5\)", r"5\text{ m}", r"5\,\text{m}", r"5\text{ g}", r"5\text{ s}", r"5\,\mathrm{V}",
        r"5\text{ m}^2",
    ],
    r"5\text{ m}": [
        "5", "5 m", "5m", r"5\,\mathrm{m}",
    ],
    r"10,\!080": [
        "10080", "10,080", r"10,\!080", r"10{,}\!080",
    ],
    "10080": [
        r"10,\!080",
    ],
    r"11,\! 111,\! 111,\! 100": [
        "11111111100", "11,111,111,100",
    ],
    "4.5": [
        "4 1/2", r"4\frac12",
    ],
    r"0.\overline{3}": [
        "1/3", r"\frac{1}{3}", "0.333333",
    ],
    r"\frac{7}{12}": [
        r"0.58\overline{3}",
    ],
    r"\frac{1}{6}": [
        "0.166667",
    ],
    r"\frac{1}{3628800}": [
        "1/3628800", r"\frac{2}{7257600}",
    ],
    "x - y": [
        "x-y", "-y+x", "x -y",
    ],
    "p - q": [
        "p-q",
    ],
    "ab": [
        "ba", r"a\cdot b", r"\text{ab}",
    ],
    "xyz": [
        "zyx",
    ],
    r"\emptyset": [
        r"\varnothing", "∅",
    ],
    r"\sqrt[3]{2}": [
        r"\sqrt[3]2",
    ],
    r"\left( 3, \frac{\pi}{2} \right)": [
        r"\left(3,\frac\pi2\right)", r"(3,\frac{\pi}2)",
    ],
    r"\frac{x}{y}": [
        r"\frac xy", r"\frac{x}y",
    ],
    r"\text{June 20}": [
        "June 20", r"\text{June 20}",
    ],
    "June 20": [
        r"\text{June 20}",
    ],
    "(1,2)": [
        "(x,y)=(1,2)", "(1, 2)",
    ],
    "(x,y)=(1,2)": [
        "(1,2)", "(x, y) = (1, 2)",
    ],
    r"\sqrt{2}": [
        r"\sqrt2\text{ cm}", r"\sqrt{2}\text{ square units}",
    ],
    r"\begin{cases} x & \text{if } x>0 \\ 0 & \text{otherwise}\end{cases}": [
        r"\begin{cases}x&\text{if }x>0\\0&\text{otherwise}\end{cases}",
    ],
    r"(\frac13,1)": [
        "(0.333333,1)",
    ],
    "1234567": [
        "1,234,567", "1{,}234{,}567", r"1\,234\,567", "1234567.0", r"1.234567\times10^{6}",
    ],
    "0.5": [
        r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", "1/2", ".5", "0.50", r"50\%", r"\frac{2}{4}",
    ],
    r"\frac{1}{3}": [
        "1/3", "0.333333", r"\tfrac13", r"x=\frac{1}{3}",
    ],
    r"\frac{3}{2}": [
        r"1\frac{1}{2}", "1.5", "3/2",
    ],
    "-3": [
        "-3", "−3", "- 3", "x=-3",
    ],
    r"50\%": [
        "50", "0.5", r"50\%", "50%", "50 percent",
    ],
    "1000": [
        r"1\times10^{3}", "10^3", "10^{3}",
    ],
    "x=5": [
        "5", "x=5", "x = 5",
    ],
    r"2\sqrt{2}": [
        r"2\sqrt2", r"\sqrt{8}", r"\sqrt{2}\cdot 2",
    ],
    r"3\pi": [
        r"3\pi", r"\pi \cdot 3", "3π",
    ],
    "x^2+2x+1": [
        "(x+1)^2", "1+2x+x^2", "x^{2}+2x+1",
    ],
    "y=2x+3": [
        "2x+3", "y=3+2x",
    ],
    r"\{1,2\}": [
        "1, 2", r"\{2,1\}", r"1\text{ and }2", "1 or 2", "x=1, x=2",
    ],
    "3,-3": [
        r"\pm 3", "-3, 3",
    ],
    "(1,2]": [
        "(1,2]", r"\left(1,2\right]", r"x \in (1,2]",
    ],
    r"(-\infty,3)\cup(5,\infty)": [
        r"(-\infty, 3) \cup (5, \infty)", r"\left(-\infty,3\right)\cup\left(5,\infty\right)",
    ],
    "(3,4)": [
        "(3, 4)", r"\left(3,4\right)", "( 3,4 )",
    ],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)",
    ],
    r"\infty": [
        r"\infty", r"+\infty",
    ],
    "Evelyn": [
        r"\text{Evelyn}", "evelyn", r"\text{evelyn}",
    ],
    "B": [
        r"\text{B}", "B", r"\textbf{(B)}", "(B)",
    ],
    "3+2i": [
        "2i+3", "3 + 2i",
    ],
    r"\ln 2": [
        r"\ln(2)", r"\ln{2}",
    ],
    "12:30": [
        "12:30",
    ],
}

MORE_HONEST = {
    "5": ["AB = 5", "f(2) = 5", "P(X=1)=5", "m+n = 5", r"5\text{ N}", r"\$5"],
    "17": [r"\textbf{(C)}\ 17", r"\text{Area} = 17\text{ cm}^2", r"\text{17 apples}"],
    "2516_8": ["2516", "2516_{8}"],
    r"4:30 \text{ PM}": ["4:30", r"4:30 \text{ p.m.}"],
    r"5 \text{ feet } 6 \text{ inches}": [r"5 \text{ feet}, 6 \text{ inches}"],
    "a=1,b=2": ["1,2", "b=2, a=1"],
    r"2\sqrt{3}\text{ cm}": [r"2\sqrt{3}", r"2\sqrt{3}\text{ cm}"],
    r"\$3.50": ["3.50", r"3.5\text{ dollars}"],
}
OF_ANOTHER_KIND = {
    "5": ["5_0", r"5 \text{ trillionths}", r"5 \text{ tens}"],
    "1011_2": ["1011_3", "1011_{16}"],
    "2516_8": ["2516_{9}", "2516.0"],
    "a_{12}": ["a", "a_{11}"],
    r"4:30 \text{ PM}": [r"4:30 \text{ AM}"],
    r"10:30 \text{ a.m.}": [r"10:30 \text{ p.m.}", r"\frac{1}{3}", "20:60"],
    r"5 \text{ feet } 6 \text{ inches}": ["5", r"5 \text{ feet}"],
    r"3 \text{ hours } 20 \text{ minutes}": ["3"],
    "a=1,b=2": ["2,1"],
    r"2\sqrt{3}\text{ cm}": [r"2\sqrt{3}\text{ m}", r"2\sqrt{3}\text{ cm}^2"],
    r"\$5": [r"5\text{ cents}"],
    "+".join(f"x^{{{i}}}" for i in range(450)): ["1" + ",111" * 1500],
    "9" * 3000: ["1" + ",111" * 1450],
}


@pytest.mark.parametrize("reference", MORE_HONEST)
def test_answers_in_the_forms_of_people(reference: str) -> None:
    assert {given: math_verify(rf"\boxed{{{given}}}", {"answer": reference}) for given in MORE_HONEST[reference]} == (
        dict.fromkeys(MORE_HONEST[reference], 1.0)
    )


@pytest.mark.parametrize("reference", OF_ANOTHER_KIND)
def test_answers_with_another_base_half_unit_or_order(reference: str) -> None:
    given = OF_ANOTHER_KIND[reference]
    assert [math_verify(rf"\boxed{{{one}}}", {"answer": reference}) for one in given] == [0.0] * len(given)


def test_answers_outside_a_box() -> None:
    assert math_verify("The answer is not 5 but 7", {"answer": "5"}) == 0.0
    assert math_verify("The answer is\n\\[\n\\frac{1}{2}\n\\]", {"answer": r"\frac{1}{2}"}) == 1.0


NO_ANSWERS = {
    "5": [
        "6=5", "1=2=3=4=5", "5=6", "5 apples, 6 pears", r"500\%", "2+3", "10-5", r"5\cdot 1", r"1\times 5",
        "5*1", r"\frac{10}{2}", "10/2", r"\sqrt{25}", "5^1", r"\boxed{5}", r"6 \boxed{5}", "5 or 6",
        r"5\text{ or }6", "5, 6", "5;6", r"\pm 5", r"\{5\}", "[5]", "(5,6)", "(5,5)", "5,5", "4<5<6",
        r"4 \le 5", "5<6", "x<5", "x>4", r"x\ne 4", r"x \neq 5", r"\int_0^5 1 dx", r"\sum_{i=1}^{5} 1",
        r"\prod_{i=5}^{5} i", r"\lim_{x\to5} x", r"\binom{5}{1}", r"\lfloor 5.5 \rfloor", r"\max(5,4)",
        r"\gcd(5,10)", r"5 \bmod 7", r"\left|-5\right|", "|-5|", "|5|", r"\log_{2} 32", r"\def\a{5}\a",
        r"\newcommand{\a}{5}\a", r"\let\a=5", r"\input{/etc/passwd}", r"\write18{ls}",
        r"\csname 5\endcsname", r"\char53", "٥", "５", "５.0", "𝟓", "Ⅴ", "⑤", '5\u200b', '\u200b5', '5\u200d',
        '5\ufeff', '\u202e5', "５/1", "²5", '5\x00', '5\x7f', "int('5')", "__import__('os').getpid()",
        "[5][0]", "lambda: 5", "eval('5')", "5 if True else 6", "5;import os", "0b101", "0x5", "5e0", "5_0",
        "5j", "True", "False", "None", "nan", "inf", r"\infty", "9**9**9**9", "9^{9^{9^{9}}}", "5!", "5!!",
        r"5\text{ million}", r"5\text{ percent off}", r"5\text{ or more}", "5 thousand", r"5\text{ times }2",
        r"5\text{ halves}", r"5\text{ thousandths}", r"5\text{ pairs}", "5 twice",
        "5x", "5ab", "5i", r"5\pi", "5e", "e5", "5.5", "5,000", "5 5", "55", "1 + 4 = 5", "x=y=5", "5=5",
        r"\text{five}", "five", "V", "", " ", ".", "{}", "$$", "?", "-5", "5-", "--5", "+-5",
        r"5\text{ k}", r"5\text{ x}", r"5\text{ M}", r"5\text{ i}", r"5\text{ incorrect}", "5m", "5 m",
        *("5" * 100_000, "(" * 50_000 + "5" + ")" * 50_000, "5," * 50_000, "{" * 900 + "5"),
    ],
    r"5\text{ m}": [
        r"5\text{ s}", "6m", r"6\text{ m}", "2+3 m",
    ],
    "10080": [
        r"10,\!08", r"10,\!0800", "10, 080",
    ],
    "4.5": [
        "4 3/2", "4 2/4 1", "4, 1/2",
    ],
    "2": [
        "4 1/2",
    ],
    "1": [
        r"0.\overline{9}",
    ],
    r"\frac{1}{3628800}": [
        "0", "0.0", "0.000000", "0.0000003", r"\frac{1}{3628801}",
    ],
    "0.0000001": [
        r"\frac{1}{1000000000}", "0", "0/1",
    ],
    "0": [
        r"\frac{1}{3628800}", "0.0000001",
    ],
    r"\frac{1000000}{3}": [
        "333333",
    ],
    r"\frac{\sqrt{2}}{10^{9}}": [
        "0", "0.0", "0.000000001", r"\frac{\sqrt{3}}{10^{9}}",
    ],
    r"\frac{\sqrt{2}}{10^{20}}": [
        r"\frac{\sqrt{3}}{10^{20}}",
    ],
    "(0.0000001,1)": [
        r"(\frac{1}{10000001},1)", "(0,1)", "(0.0,1)",
    ],
    r"\begin{pmatrix}\frac{1}{100000000}\\1\end{pmatrix}": [
        r"\begin{pmatrix}0.0\\1\end{pmatrix}",
    ],
    "x - y": [
        "y-x", "x+y", "x", "x-y=x-y",
    ],
    "ab": [
        "a+b", "a", "abc", "ab=ab",
    ],
    "no": [
        "on",
    ],
    "iv": [
        "vi",
    ],
    "cm": [
        "mc",
    ],
    "5x^4": [
        r"\frac{dx^5}{dx}", r"\frac{d x^5}{d x}", r"\dfrac{\mathrm{d}x^5}{\mathrm{d}x}",
        r"\frac{d\left(x^5\right)}{dx}", r"\frac{d}{dx}x^5",
    ],
    r"5x^4\sin x+x^5\cos x": [
        r"\frac{dx^5\sin x}{dx}",
    ],
    r"\sqrt{2}": [
        r"\sqrt{2}\text{ is wrong }\sqrt{3}", r"\sqrt{2}\text{ is wrong}", r"\sqrt{2}\mathrm{not}\sqrt{3}",
        r"\sqrt{2}\text{ cm}\sqrt{3}", r"\sqrt{2}\mbox{ no }", r"(\sqrt{2}\text{ cm},5)", r"\sqrt{2}\textbf{ no }",
    ],
    r"\begin{cases}x&\text{if }x>0\\0&\text{otherwise}\end{cases}": [
        r"\begin{cases}x&\text{if }x>0\\1&\text{otherwise}\end{cases}",
    ],
    r"\text{June 20}": [
        "June 21", "June 2", "20",
    ],
    "(1,2)": [
        "(y,x)=(1,2)", "(x,y)=(2,1)", "(x,y)=(1,2)=(1,2)", "(x,x)=(1,2)", "(x,y)=(0+1,2)", "(x,y)=(1,2),(3,4)",
    ],
    "(x,y)=(1,2)": [
        "(y,x)=(1,2)", "(2,1)", "(x,y)=(2,1)",
    ],
    r"\frac{\pi}{2}": [
        r"\frac\pi3", r"\frac2\pi",
    ],
    r"\sqrt[3]{27}": [
        r"\sqrt[3]27",
    ],
    r"\begin{pmatrix}7\\10\end{pmatrix}": [
        r"\begin{pmatrix}1&2\\2&2\end{pmatrix}\begin{pmatrix}3\\2\end{pmatrix}",
        r"\begin{pmatrix}1&2\\2&2\end{pmatrix}\cdot\begin{pmatrix}3\\2\end{pmatrix}",
        r"\left(\begin{array}{cc}1&2\\2&2\end{array}\right)\left(\begin{array}{c}3\\2\end{array}\right)",
        r"\begin{pmatrix}3\\4\end{pmatrix}+\begin{pmatrix}4\\6\end{pmatrix}",
        r"\begin{pmatrix}8\\11\end{pmatrix}-\begin{pmatrix}1\\1\end{pmatrix}",
    ],
    r"\begin{pmatrix}\sqrt{2}\\2\end{pmatrix}": [
        r"\begin{pmatrix}\sqrt{2}\\1\end{pmatrix}+\begin{pmatrix}0\\1\end{pmatrix}",
    ],
    "(2,1)": [
        "(4 1/2,1)",
    ],
    "(0.3,1)": [
        r"(0.\overline{3},1)",
    ],
    "(0,1)": [
        r"(0.\overline{3},1)",
    ],
    "(-2,1)": [
        r"(\begin{vmatrix}1&2\\3&4\end{vmatrix},1)",
    ],
    "391": [
        r"17\cdot 23", r"17 \times 23", "17*23", "17(23)", "(17)(23)", "400-9", r"\frac{782}{2}",
        r"17 \cdot 2.3 \times 10^1",
    ],
    "5050": [
        r"\sum_{i=1}^{100} i", r"\frac{100\cdot 101}{2}", r"1+2+\dots+100",
    ],
    "0.5": [
        r"\int_0^1 x dx", "1-0.5", r"\frac{1}{1+1}", "2^{-1}", r"\cos 60^\circ", "5000%", r"\frac{1}{2}+0",
        "0.5=1/2",
    ],
    "120": [
        "5!", r"5\cdot 4\cdot 3\cdot 2", r"\Gamma(6)",
    ],
    "1024": [
        "2^{10}", "2^10", "4^5", "32^2",
    ],
    "12": [
        r"1.2\times10^{0}\times10", r"12\times10^0", "10+2", "1,2", "12 or 13",
    ],
    "1,2": [
        "1,2,3", "1", "1,1", r"\{1,2,2\}", "1<2", "1,2,1+1", r"1, 1\cdot 2",
    ],
    "(391,1)": [
        r"(17\cdot 23, 1)", "(391,1),(1,391)", "(1,391)", "(391)",
    ],
    r"\{1,2\}": [
        r"\{1,2,3\}", r"\{1\}", r"\{1,1+1\}",
    ],
    "(1,2]": [
        "[1,2]", "(1,2)", "(1,1+1]", r"(1,2] \cup (3,4]",
    ],
    "x^2+1": [
        "x^2+1=x^2+1", "x^2+1, x^2", r"\int 2x dx", r"\frac{d}{dx}(x^3/3+x)", "x^2",
    ],
    "yes": [
        "sey", "esy", "no", "yes or no", "y e s no",
    ],
    "B": [
        "A", "A or B", "ABCD", r"\text{A, B}", "C",
    ],
    r"\frac{1}{3}": [
        "0.33", "1/3=0.33", "0.333", r"\frac{1}{0}",
    ],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [
        r"\begin{pmatrix}1\\1+1\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}",
    ],
}
# fmt: on


def test_there_are_many() -> None:
    assert sum(map(len, HONEST.values())) >= 60 and sum(map(len, NO_ANSWERS.values())) >= 80


@pytest.mark.parametrize("answer", HONEST)
def test_honest_answers_are_paid(answer: str) -> None:
    for given in HONEST[answer]:
        assert math_verify(rf"so it is \boxed{{{given}}}.", {"answer": answer}) == 1.0, given


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_what_is_no_answer_is_not_paid(answer: str) -> None:
    for given in NO_ANSWERS[answer]:
        assert math_verify(rf"so it is \boxed{{{given}}}.", {"answer": answer}) == 0.0, given[:80]


@pytest.mark.parametrize("answer", ["5", "391", "0.5"])
def test_answers_that_break_out_of_their_box_are_not_paid(answer: str) -> None:
    for response in (
        rf"\boxed{{6}} \boxed{{{answer}}} \boxed{{7}}",
        rf"\boxed{{\boxed{{{answer}}} or 6}}",
        rf"\boxed{{6}}{answer}",
        rf"\boxed{{}} {answer}",
        rf"\boxed{{6 }} {{{answer}}}",
        rf"\boxed{{{answer}",
        "\\boxed{" * 20_000 + answer,
    ):
        assert math_verify(response, {"answer": answer}, boxed_only=True) == 0.0, response[:80]


def test_loose_pays_what_the_library_finds_equal() -> None:
    for answer, given in (("391", r"17\cdot 23"), ("5", r"500\%"), ("120", "5!"), ("5", "6=5")):
        assert math_verify(rf"\boxed{{{given}}}", {"answer": answer}) == 0.0
        assert math_verify(rf"\boxed{{{given}}}", {"answer": answer}, loose=True) == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42", "42"),
        ("The answer is $x=5$, in 3 steps", "x=5"),
        ("so 6 * 7 = 42.", "42"),
        (r"hence \(\frac{1}{2}\)", r"\frac{1}{2}"),
        (r"hence \frac{1}{2}", None),
        ("x2 and y3", None),
        ("no", None),
        ("$" * 100_001, None),
    ],
)
def test_the_last_value_of_a_text(text: str, value: str | None) -> None:
    assert last_value(text) == value


def test_a_box_with_a_box_in_it() -> None:
    assert last_boxed(r"\boxed{6 \boxed{5}}", outermost=True) == r"6 \boxed{5}"
    assert last_boxed(r"\boxed{1} \boxed{2}", outermost=True) == "2"
    assert last_boxed("none") is None


@pytest.mark.parametrize("answer", ["$$", "...", "\\boxed{}", "{}", "\u0665"])
def test_a_row_without_mathematics_is_refused(answer: str) -> None:
    check = load_reward("math_verify").check_row
    assert check is not None
    with pytest.raises(ValueError, match=r"^finds nothing mathematical in the row's answer "):
        check({"answer": answer})
    with pytest.raises(ValueError, match=r"^finds nothing mathematical in the row's answer "):
        math_verify("1", {"answer": answer})

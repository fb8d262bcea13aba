"""Formulas: LaTeX in the pages, MathML in the site, which browsers draw without any script."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_MARKED = re.compile(r'<(div|span) class="arithmatex">(.*?)</\1>', re.DOTALL)


def as_mathml(page: str) -> str:
    r"""What `pymdownx.arithmatex` has marked, \(inline\) or \[on lines of their own\], as MathML."""

    def drawn(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        return convert(latex[2:-2].strip(), display="block" if latex.startswith(r"\[") else "inline")

    return _MARKED.sub(drawn, page)

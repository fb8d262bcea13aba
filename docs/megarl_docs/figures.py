"""Drawings: SVG files stand in the page itself, so that they take its colours."""

from __future__ import annotations

import re
from pathlib import Path

_IMAGE = re.compile(r'<img alt="([^"]*)" src="[^"]*drawings/([\w-]+)\.svg" ?/?>')


def inline(page: str, folder: Path) -> str:
    """A page whose images of `folder` are elements of it, with the image's text for those who cannot see it."""

    def drawn(found: re.Match[str]) -> str:
        svg = (folder / f"{found[2]}.svg").read_text(encoding="utf-8")
        svg = svg.replace("<svg ", f'<svg class="drawing" role="img" aria-label="{found[1]}" ', 1)
        return f'<span class="scroll">{svg}</span>'

    return _IMAGE.sub(drawn, page)

"""The pages of the documentation, as text and as what their fences hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

_FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fence of a page.

    Attributes:
        title: the file that it is, if it is a whole one.
    """

    page: Path
    language: str
    title: str | None
    body: str


def blocks(page: Path) -> Iterator[Block]:
    """All fences, in order."""
    for _, language, title, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield Block(page=page, language=language, title=title or None, body=body)


def commands(page: Path) -> list[str]:
    """Command lines in fences and indented code, continued lines joined; "$ " and comments left out."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    shell = [
        line for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL) for line in block.split("\n")
    ]
    outside = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    shell += [
        line
        for line in outside.split("\n")
        if re.match(r" {4}(?:\$ )?(?:megarl|bash|python|torchrun|sbatch|pip) ", line)
    ]
    lines = (re.split(r"(?:^| +)#", line.strip().removeprefix("$ "))[0].strip() for line in shell)
    return [line for line in lines if line and not line.startswith("megarl:")]

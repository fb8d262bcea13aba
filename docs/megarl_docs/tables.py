"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are Markdown, of one line each."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text that stays within its cell."""
    return " ".join(text.split()).replace("|", r"\|")


def code(text: str) -> str:
    """As code; empty text stays empty. A bar inside a table's code is an entity, since a backslash would be shown."""
    if not text:
        return ""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{escaped}</code>"


def plain(text: str) -> str:
    """Text of the code's, in which only `code` is Markdown: nothing else in it is marked."""
    parts = text.split("`")
    escaped = (part.replace("_", r"\_").replace("*", r"\*").replace("<", "&lt;") for part in parts[::2])
    return "`".join(x for pair in zip_longest(escaped, parts[1::2]) for x in pair if x is not None)

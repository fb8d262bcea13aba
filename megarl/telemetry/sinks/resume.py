"""Reading back and cutting the text files of a run that is resumed."""

from __future__ import annotations

import os


def complete_lines(path: str) -> list[str]:
    """Lines of a text file, without a last one that a killed run left half-written; none if there is no file."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return [line for line in f if line.endswith("\n")]


def rewrite(path: str, text: str) -> None:
    """Replace a file's content in one move: a kill in between leaves the old or the new, never half of it."""
    with open(path + ".new", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".new", path)

"""Keys of other programs, and what they are here: the tables that `megarl config --migrate` converts by."""

from __future__ import annotations

from megarl.config.migration import entries
from megarl_docs.tables import code, plain, table

_WORDS = {"carried": "the same here", "translated": "another key here", "refused": "none here"}


def reference(source: str) -> str:
    """A table of each kind.

    Args:
        source: the other program, "verl" or "trl".
    """
    found = entries(source)
    parts = []
    for kind, heading in _WORDS.items():
        rows = [[code(e.key), code(e.to), plain(e.why)] for e in found if e.kind == kind]
        if rows:
            columns = [f"{source}'s key", "here", "what is different, or why"]
            parts.append(f"### {source}: {heading}\n\n{table(columns, rows)}")
    return "\n".join(parts)

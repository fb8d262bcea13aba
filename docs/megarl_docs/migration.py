"""Keys of other programs, and what they are here: the tables that `megarl config --migrate` converts by."""

from __future__ import annotations

from megarl.migration import entries
from megarl_docs.tables import code, plain, table

_WORDS = {"carried": "the same here", "translated": "another key here", "refused": "none here"}


def reference(source: str) -> str:
    """A table of each kind.

    Args:
        source: the other program: "verl", "trl" or "openrlhf".
    """
    parts = []
    for kind, heading in _WORDS.items():
        found = [e for e in entries(source) if e.kind == kind]
        differ = any(e.to not in ("", e.key) for e in found)
        rows = [[code(e.key), *[code(e.to)] * differ, plain(e.why)] for e in found]
        columns = [f"{source}'s key", *["here"] * differ, "what is different, or why"]
        if rows:
            parts.append(f"### {source}: {heading}\n\n{table(columns, rows)}")
    return "\n".join(parts)

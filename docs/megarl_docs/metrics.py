"""The reference of metrics, from the registry of them."""

from __future__ import annotations

from megarl.telemetry.metrics import METRICS, PLACEHOLDERS
from megarl_docs.tables import code, plain, table


def reference() -> str:
    """What stands in braces, and a table for each group, which is the part of a name before "/"."""
    stands_for = [[code(f"{{{name}}}"), plain(what)] for name, what in PLACEHOLDERS.items()]
    parts = [table(["in braces", "stands for"], stands_for)]
    groups: dict[str, list[list[str]]] = {}
    for metric in METRICS:
        row = [code(metric.name), metric.unit, plain(metric.meaning), metric.reduction]
        groups.setdefault(_group(metric.name), []).append(row)
    for name, rows in groups.items():
        parts.append(f"## {name}\n\n{table(['metric', 'unit', 'meaning', 'taken over'], rows)}")
    return "\n".join(parts)


def _group(name: str) -> str:
    first = name.partition("/")[0]
    return "general" if first.startswith("{") or "/" not in name else first

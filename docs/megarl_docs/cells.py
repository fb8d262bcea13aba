"""Cells of tables with the names of their columns, which a narrow screen shows in place of the table's head."""

from __future__ import annotations

import re
from itertools import cycle

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)


def labelled(page: str) -> str:
    """A page whose tables' cells name their column: `<td data-label="default">`. Each row has a cell of each column."""

    def with_labels(table: re.Match[str]) -> str:
        heads = (re.sub(r"<[^>]+>", "", head).strip().replace('"', "&quot;") for head in _HEAD.findall(table[0]))
        labels = cycle(heads)
        return re.sub(r"<td(?=[ >])", lambda _: f'<td data-label="{next(labels)}"', table[0])

    return _TABLE.sub(with_labels, page)

"""Cells of tables as screens need them: with the name of their column, and with long code that may be broken."""

from __future__ import annotations

import re
from itertools import cycle

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)
_LONG_CODE = re.compile(r"<code>[^<]{20,}</code>")


def fitted(page: str) -> str:
    """A page whose tables fit narrow columns, and narrow screens, which show a row as a card.

    A cell names its column, `<td data-label="default">`, of which each row has one cell. Code of 20 characters or more
    may be broken after a dot, an underscore, a slash or an equals sign.
    """
    return _TABLE.sub(lambda table: _LONG_CODE.sub(_breakable, _labelled(table[0])), page)


def _labelled(table: str) -> str:
    heads = (re.sub(r"<[^>]+>", "", head).strip().replace('"', "&quot;") for head in _HEAD.findall(table))
    labels = cycle(heads)
    return re.sub(r"<td(?=[ >])", lambda _: f'<td data-label="{next(labels)}"', table)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(?<=\w[._/=])(?=\w)", "<wbr>", code[0])

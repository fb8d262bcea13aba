"""1 for what a regular expression takes out of the response, if it is the reference answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.arguments import compiled
from megarl.rewards.registry import register
from megarl.rewards.rows import check_answer


def _check_args(*, pattern: str, compare: bool) -> None:
    compiled(pattern, "pattern", groups=1 if compare else None)


@register("regex", check_args=_check_args)
def regex(response: str, row: Mapping[str, Any], *, pattern: str, compare: bool = True) -> float:
    """Compare what the group of a pattern's last match holds with the answer, blanks at both ends aside.

    Args:
        pattern: a regular expression of Python with one group, "<answer>(.*?)</answer>"; "(?s)" in front lets "." match
            line ends.
        compare: false: 1 for any match, and the row needs no `answer`.
    """
    last: re.Match[str] | None = None
    for match in re.finditer(pattern, response):
        last = match
    if last is None or not compare:
        return float(last is not None)
    check_answer(row)
    return float((last[1] or "").strip() == str(row["answer"]).strip())

"""Reads the functions that a row offers to the model, as TRL and transformers have them in the column `tools`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megarl.data.messages import Message, without_nulls
from megarl.data.readers import Row, value_or_none


def tools_of(row: Row, key: str) -> list[Message]:
    """Return the row's tools, as JSON schemas of functions; none where the column is missing, null or empty.

    The column holds a list, or one as JSON. Fields of a list that are null, as Parquet fills them in, are left out.

    Raises:
        ValueError: the column holds something else.
    """
    value: Any = value_or_none(row.columns, key) if key else None
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else without_nulls(value)
    except (ValueError, RecursionError) as e:
        raise _refused(row, key, f"are no JSON: {e!s:.80}") from e
    if not tools:
        return []
    if not isinstance(tools, list):
        raise _refused(row, key, f"must be a list, or one as JSON, not {type(tools).__name__}")
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise _refused(row, key, f'must be like {{"type": "function", "function": {{"name": …}}}}; {number} is not')
    return tools


def _refused(row: Row, key: str, reason: str) -> ValueError:
    return ValueError(
        f"{row.source}: the tools in column '{key}' {reason}; if it is not for the chat template, set data.tools_key="
    )

"""Reads rows with an answer that is said to be desirable or not."""

from __future__ import annotations

from megarl.config.data import Data
from megarl.data.answers import answered
from megarl.data.examples import Example
from megarl.data.readers import Row, require_column, value_at
from megarl.data.tokenizer import Tokenizer


def judged(row: Row, data: Data, tokenizer: Tokenizer) -> Example:
    """Tokenise an answer with the label 1 for desirable, 0 for not.

    Raises:
        ValueError: the row cannot be used, or (`TooLong`) has more tokens than the section allows.
    """
    require_column([row], data.label_key, "data.label_key")
    label = value_at(row.columns, data.label_key)
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise ValueError(
            f"{row.source}: the label in column '{data.label_key}' must be true, false, 1 or 0, not {label!r:.40}"
        )
    return Example(sequences=(answered(row, data, tokenizer),), label=float(label), source=row.source)

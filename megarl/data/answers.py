"""Answers that the data holds, as tokens to learn."""

from __future__ import annotations

import math

from megarl.config.data import Data
from megarl.data.encode import TooLong, encode_text
from megarl.data.readers import Row, require_column, value_at
from megarl.data.tokenizer import Tokenizer


def answer_ids(row: Row, key: str, section_key: str, data: Data, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The answer in a column, tokenised on its own, and the end-of-sequence token.

    Args:
        key: name of the column.
        section_key: the configuration key that names it, such as "data.answer_key".

    Raises:
        ValueError: no such column, an answer that is neither text nor a finite number, or one over
            `data.max_response_length` tokens (`TooLong`).
    """
    require_column([row], key, section_key)
    answer = value_at(row.columns, key)
    is_number = type(answer) is int or (type(answer) is float and math.isfinite(answer))
    if not (isinstance(answer, str) or is_number):  # str(None) would teach the model to say "None", str(True) "True"
        kind = f"{answer}" if isinstance(answer, float) else "null" if answer is None else type(answer).__name__
        raise ValueError(f"{row.source}: the answer in column '{key}' must be text or a number, not {kind}")
    return fitting_answer((*encode_text(str(answer), row.source, tokenizer), tokenizer.eos_id), key, row.source, data)


def fitting_answer(ids: tuple[int, ...], key: str, source: str, data: Data) -> tuple[int, ...]:
    """The same; raises TooLong if it has more than `data.max_response_length` tokens."""
    if len(ids) > data.max_response_length:
        raise TooLong(
            f"{source}: the answer in column '{key}' has {len(ids)} tokens with its end token, more than "
            f"data.max_response_length = {data.max_response_length}"
        )
    return ids

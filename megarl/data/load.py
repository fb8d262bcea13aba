"""Files to examples, whatever their rows are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from megarl.config.data import Data
from megarl.data.demonstrations import demonstration
from megarl.data.encode import TooLong
from megarl.data.examples import Example
from megarl.data.formats import Format
from megarl.data.judged import judged
from megarl.data.preferences import preference
from megarl.data.readers import Row, iterate_rows
from megarl.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_OF_ROW: Mapping[Format, Callable[[Row, Data, Tokenizer], Example]] = {
    "demonstrations": demonstration,
    "preferences": preference,
    "judged": judged,
}


def load_examples(
    data: Data, format: Format, files: Sequence[str], tokenizer: Tokenizer, what: str = "data.train_files"
) -> list[Example]:
    """Read and tokenise the examples of some files, one per row.

    Args:
        data: column names and lengths; rows that are too long are dropped with `data.filter_overlong_prompts`.
        what: the key that names the files, for messages.

    Raises:
        ValueError: unreadable files, a row that cannot be used, or no row left after filtering.
    """
    seen, examples = 0, []
    for row in iterate_rows(files, what):
        seen += 1
        try:
            examples.append(_OF_ROW[format](row, data, tokenizer))
        except TooLong:
            if not data.filter_overlong_prompts:
                raise
    if not examples:
        raise ValueError(
            f"{what}: none of the {seen} rows keeps to data.max_prompt_length = {data.max_prompt_length} and "
            f"data.max_response_length = {data.max_response_length} tokens"
        )
    if len(examples) < seen:
        _log.info("%s: %d of %d rows dropped, too long", what, seen - len(examples), seen)
    return examples

"""Files to examples, whatever their rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megarl.config.data import DataConfig
from megarl.data.demonstrations import demonstration, judged
from megarl.data.encode import TooLong, special_remark
from megarl.data.examples import Example
from megarl.data.formats import Format
from megarl.data.messages import strings_in
from megarl.data.preferences import preference
from megarl.data.readers import Row, iterate_rows, value_or_none
from megarl.data.scan import finder_of
from megarl.data.tokenizer import Tokenizer

_OF_ROW: Mapping[Format, Callable[[Row, DataConfig, Tokenizer], Example]] = {
    "demonstrations": demonstration,
    "preferences": preference,
    "judged": judged,
}


class Loaded(NamedTuple):
    """The examples of some files, and what was left out, for the start of the run."""

    examples: list[Example]
    remarks: tuple[str, ...]


def load_examples(
    data: DataConfig, format: Format, files: Sequence[str], tokenizer: Tokenizer, what: str = "data.train_files"
) -> Loaded:
    """Read and tokenise the examples of some files, one per row.

    Args:
        data: column names and lengths; rows that are too long are dropped with `data.filter_overlong_prompts`.
        what: the key that names the files, for messages.

    Raises:
        ValueError: unreadable files, a row that cannot be used, or no row left after filtering.
    """
    seen, special, examples, spells = 0, 0, [], finder_of(tokenizer.special_tokens)
    keys = (data.prompt_key, data.answer_key, data.messages_key, data.tools_key, data.chosen_key, data.rejected_key)
    for row in iterate_rows(files, what):
        seen += 1
        special += any(spells(text) for key in keys for text in strings_in(value_or_none(row.columns, key)))
        try:
            examples.append(_OF_ROW[format](row, data, tokenizer))
        except TooLong:
            if not data.filter_overlong_prompts:
                raise
    limits = (
        f"data.max_prompt_length = {data.max_prompt_length}",
        f"data.max_response_length = {data.max_response_length}",
    )
    if not examples:
        raise ValueError(f"{what}: none of the {seen} rows keeps to {limits[0]} and {limits[1]} tokens")
    remarks = (*special_remark(what, special, seen, data), *_nothing_to_learn(examples, format, what))
    if len(examples) == seen:
        return Loaded(examples, remarks)
    limit = " or ".join(limits)
    if data.messages_key and format == "demonstrations":
        limit = f"data.max_prompt_length + data.max_response_length = {data.max_sequence_length}"
    left_out = seen - len(examples)
    return Loaded(examples, (f"{what}: {left_out} of {seen} rows left out: {left_out} over {limit} tokens", *remarks))


def _nothing_to_learn(examples: Sequence[Example], format: Format, what: str) -> tuple[str, ...]:
    """Remark on rows that teach nothing, of a format whose rows only together teach something."""
    if format == "preferences":
        same = sum(example.sequences[0] == example.sequences[1] for example in examples)
        if same:
            return (f"remark: {what}: in {same} of {len(examples)} pairs chosen and rejected are the same",)
    if format == "judged" and len(labels := {example.label for example in examples}) == 1:
        (label,) = labels
        return (f"remark: {what}: all {len(examples)} answers have the label {label:g}; the other one is missing",)
    return ()

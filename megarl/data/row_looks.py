"""Looks at rows with answers without tokenising them: whether they can be used, and which of them are the same.

The functions that tokenise a row are called with a stand-in for the tokenizer, so that what they refuse is refused. Two
numbers stand for a text, and for a message. Torch-free, for worker processes.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, cast

from megarl.config.data import DataConfig
from megarl.data.demonstrations import demonstration, judged
from megarl.data.examples import Example
from megarl.data.formats import Format
from megarl.data.messages import Messages
from megarl.data.preferences import preference
from megarl.data.readers import Row
from megarl.data.tokenizer import Tokenizer

OF_ROW: Mapping[Format, Callable[[Row, DataConfig, Tokenizer], Example]] = {
    "demonstrations": demonstration,
    "preferences": preference,
    "judged": judged,
}
"""Tokenises a row of a format."""


class LateTokenizer:
    """Holds a tokenizer that another process opens when it first needs it: transformers takes 60 MB.

    Attributes:
        opened: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.opened = tokenizer

    def __getstate__(self) -> bytes:
        return pickle.dumps(self.opened)

    def __setstate__(self, state: bytes) -> None:
        self._pickled = state

    def __getattr__(self, name: str) -> Any:
        if name != "opened":
            raise AttributeError(name)
        self.opened = pickle.loads(self._pickled)
        return self.opened


Form = tuple[Any, ...]
"""How the messages of a row follow each other: for each conversation that is encoded, roles, and which are empty."""

_BEGINNING, _END = 1, -1  # of a stand-in's conversation, and of its answer; no text has these numbers
_NO_LIMIT = {"max_prompt_length": 2**30, "max_response_length": 2**30}
_SURE = re.compile(r"[^\W_]").search  # a letter or digit has tokens
_two_numbers = struct.Struct("<II").unpack


class RowLooks:
    """Looks at rows of a format. The first row of each form is tokenised, to see that the chat template takes it."""

    def __init__(self, format: Format, data: DataConfig, tokenizer: LateTokenizer) -> None:
        self._of_row, self._tokenizer = OF_ROW[format], tokenizer
        self._data = data.model_copy(update=_NO_LIMIT)
        self._stand_in = StandIn(tokenizer)
        self._noted, self._accepted = {()}, {()}

    def stand_in(self, row: Row) -> Example:
        """Return the row's example, with numbers that stand for its texts in the place of tokens.

        Two rows have the same sequences if they say the same, in any process.

        Raises:
            ValueError: the row cannot be used.
        """
        self._stand_in.begin()
        return self._of_row(row, self._data, cast(Tokenizer, self._stand_in))

    def look(self, row: Row, *, spells_special: bool) -> tuple[Example, Form | None]:
        """Return what `stand_in` does, and the row's form if it is the first of its form in this process: see `accept`.

        Args:
            spells_special: the row has texts of which only the tokenizer knows whether they can be read.

        Raises:
            ValueError: the row cannot be used; how long it is does not matter.
        """
        example, form = self.stand_in(row), self._stand_in.form
        if form is None or spells_special:
            self._of_row(row, self._data, self._tokenizer.opened)
        if form is None or form in self._noted:
            return example, None
        self._noted.add(form)
        return example, form

    def accept(self, form: Form, row: Row) -> None:
        """Tokenise a row, unless one of its form was tokenised before; raises ValueError where that fails."""
        if form not in self._accepted:
            self._of_row(row, self._data, self._tokenizer.opened)
            self._accepted.add(form)


class StandIn:
    """Stands in for a tokenizer where rows are looked at.

    Attributes:
        form: of the row that it was last called for; None where the template has to see the row itself, which has tools
            or messages with more than a role and a content.
    """

    eos_id = _END

    def __init__(self, tokenizer: LateTokenizer) -> None:
        self._tokenizer = tokenizer
        self.begin()

    def begin(self) -> None:
        """Begin another row."""
        self.form: Form | None = ()
        self._numbers: dict[tuple[str, str], tuple[int, int]] = {}  # of the messages of this row

    def encode(self, text: str) -> list[int]:
        return [*_numbers(text)] if _SURE(text) or self._tokenizer.opened.encode(text) else []

    def encode_chat(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> list[int]:
        numbers, roles, known = [_BEGINNING], [], self._numbers
        if tools:
            numbers += _numbers(json.dumps(tools, sort_keys=True))
        for message in messages:
            role, content = key = message["role"], message["content"]
            if len(message) > 2:
                self.form = None
                numbers += _numbers(json.dumps(message, sort_keys=True))
                continue
            pair = known.get(key)
            if pair is None:
                pair = known[key] = _numbers(f"{role}\n{content}")
            numbers += pair
            roles.append(role if content else (role,))
        if tools:
            self.form = None
        elif self.form is not None:
            self.form += (reply, *roles)
        return numbers

    def chat_text(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> str:
        return json.dumps([*messages, *tools])


def _numbers(text: str) -> tuple[int, int]:
    first, second = _two_numbers(blake2b(text.encode(), digest_size=8).digest())
    return first >> 1, second >> 1

"""Reads a tokenizer from a Hugging Face directory."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from megarl.data.messages import Messages
from megarl.data.special_tokens import SpecialTokens
from megarl.data.template_process import TemplateProcess
from megarl.data.tokenizer_growth import check_growth

_OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "tokenize")


@contextmanager
def no_panic(what: str) -> Iterator[None]:
    """Raise ValueError for what makes the library panic inside; its own error is not even an Exception."""
    try:
        yield
    except BaseException as e:
        if (type(e).__module__, type(e).__name__) != ("pyo3_runtime", "PanicException"):
            raise
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"{what} failed: {reason}") from e


class HuggingFaceTokenizer:
    """Reads a tokenizer (`megarl.data.tokenizer.Tokenizer`) from local files only; runs no Python that comes with them.

    Args:
        read_special_tokens: special tokens that texts spell become these tokens.

    Raises:
        ValueError: the directory cannot be read, transformers is absent, there is no end-of-sequence token, or the chat
            template does not read one of `template_arguments`.
    """

    def __init__(
        self, directory: str, template_arguments: Mapping[str, Any], *, read_special_tokens: bool = False
    ) -> None:
        try:
            from transformers import AutoTokenizer  # costs a second to import
        except ImportError as e:
            raise ValueError(f"reading the tokenizer in '{directory}' needs `pip install transformers`") from e
        check_growth(directory)
        self._directory = directory
        try:
            with no_panic(f"the tokenizer in '{self._directory}'"):
                self._tokenizer = AutoTokenizer.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
        except Exception as e:  # the library's parsers raise anything, bare Exception included
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"'{directory}' holds no readable Hugging Face tokenizer: {reason}") from e
        self.vocab_size = len(self._tokenizer)
        eos_id = self._tokenizer.eos_token_id
        if eos_id is None:
            raise ValueError(f"the tokenizer in '{directory}' has no eos_token: responses could never end")
        self.eos_id = int(eos_id)
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.pad_id: int | None = self._tokenizer.pad_token_id
        self._arguments = dict(template_arguments)
        for name in self._arguments:
            if name in _OWN_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                raise ValueError(
                    f"data.apply_chat_template_kwargs: the chat template in '{directory}' reads no '{name}' from there"
                )
        added = self._tokenizer.added_tokens_decoder
        self._special = SpecialTokens({str(token): i for i, token in added.items() if token.special})
        self.special_tokens: Mapping[str, int] = self._special.ids
        # unknown characters become the unknown token, which no text can forge anything with
        self._control = frozenset(self._special.ids.values()) - {self._tokenizer.unk_token_id}
        self._reads_special_tokens = read_special_tokens
        self._lock = threading.Lock()  # how special tokens are read is a state of the library's object
        self._template = TemplateProcess()

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process open the tokenizer anew."""
        opened = partial(HuggingFaceTokenizer, read_special_tokens=self._reads_special_tokens)
        return opened, (self._directory, self._arguments)

    def encode(self, text: str) -> list[int]:
        text.encode()  # the library does not say that half of a surrogate pair is what it cannot read
        if self._reads_special_tokens:
            return self._encoded(text)
        return self._checked(self._encoded(text, split=self._special.in_text(text)))

    def encode_alone(self, text: str) -> list[int]:
        """Tokenise a text as transformers does by default: with the tokens that the files put around every text."""
        with self._lock, no_panic(f"the tokenizer in '{self._directory}'"):
            return list(self._tokenizer(text)["input_ids"])

    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int]]:
        if not texts:
            return []
        keys = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        with self._lock, no_panic(f"the tokenizer in '{self._directory}'"):
            encoded = list(self._tokenizer(list(texts), **keys)["input_ids"])
        if self._reads_special_tokens:
            return encoded
        spelt = map(self._special.in_text, texts)
        return [
            self.encode(text) if is_spelt else self._checked(ids)
            for text, ids, is_spelt in zip(texts, encoded, spelt, strict=True)
        ]

    def encode_chat(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> list[int]:
        return self.encode_template(self.chat_text(messages, reply=reply, tools=tools))

    def encode_template(self, text: str) -> list[int]:
        text.encode()
        if self._reads_special_tokens:
            return self._encoded(text)
        whole, parts = self._encoded(text), self._special.parts(text)
        if sum(map(self._control.__contains__, whole)) > len(parts) // 2:
            raise ValueError(self._forged())
        if not self._special.has_masks(text):
            return whole
        encoded = [[self._special.ids[part]] if i % 2 else self._encoded(part) for i, part in enumerate(parts) if part]
        if list(chain.from_iterable(encoded)) != whole:
            raise ValueError(
                "it spells special tokens, which this tokenizer cannot read as text within a conversation; take them "
                "out, or set data.read_special_tokens=true"
            )
        spelt = [[self._special.ids[part]] if i % 2 else self._as_text(part) for i, part in enumerate(parts) if part]
        return list(chain.from_iterable(spelt))

    def chat_text(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer in '{self._directory}' has no chat template: give prompts as plain text")
        schemas = [dict(tool) for tool in tools] or None
        variables: dict[str, Any] = {"tools": schemas, "documents": None, "add_generation_prompt": reply}
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not self._reads_special_tokens:
            given, variables = self._special.masked(given), self._special.masked(variables)
        variables |= {**self._tokenizer.special_tokens_map, **self._arguments}
        template = self._tokenizer.get_chat_template(None, schemas)
        return self._template.render(str(template), given, variables)

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in ids if i < self.vocab_size]
        # whatever the tokenizer's files say: "x = [ 1 , 2 ]" is what the policy wrote, and not "x = [ 1, 2 ]"
        with no_panic(f"the tokenizer in '{self._directory}'"):
            return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token(self, id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(id) or "") if id < self.vocab_size else ""

    def _as_text(self, masked: str) -> list[int]:
        text = self._special.unmasked(masked)
        return self._checked(self._encoded(text, split=self._special.in_text(text)))

    def _encoded(self, text: str, *, split: bool = False) -> list[int]:
        with self._lock, no_panic(f"the tokenizer in '{self._directory}'"):
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split))

    def _checked(self, ids: list[int]) -> list[int]:
        """Return the ids as they are; raises ValueError if a special token has come out of a text."""
        if self._control.isdisjoint(ids):
            return ids
        raise ValueError(self._forged())

    @staticmethod
    def _forged() -> str:
        return (
            "the tokenizer makes a special token of its text; change the text, or set data.read_special_tokens=true if "
            "that is meant"
        )

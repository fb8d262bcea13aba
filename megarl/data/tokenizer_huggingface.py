"""Tokenizer from a Hugging Face directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "tokenize")


class HuggingFaceTokenizer:
    """See `megarl.data.tokenizer.Tokenizer`. Reads local files only and runs no code that comes with them.

    Raises:
        ValueError: the directory cannot be read, transformers is absent, there is no end-of-sequence token, or the chat
            template does not read what it is to be told.
    """

    def __init__(self, directory: str, template_arguments: Mapping[str, Any]) -> None:
        try:
            from transformers import AutoTokenizer  # costs a second to import
        except ImportError as e:
            raise ValueError(f"reading the tokenizer in '{directory}' needs `pip install transformers`") from e
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as e:  # the library's parsers raise anything, bare Exception included
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"'{directory}' holds no readable Hugging Face tokenizer: {reason}") from e
        self._directory = directory
        self.vocab_size = len(self._tokenizer)
        eos_id = self._tokenizer.eos_token_id
        if eos_id is None:
            raise ValueError(f"the tokenizer in '{directory}' has no eos_token: responses could never end")
        self.eos_id = int(eos_id)
        self._arguments = dict(template_arguments)
        for name in self._arguments:
            if name in _OWN_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                raise ValueError(
                    f"data.apply_chat_template_kwargs: the chat template in '{directory}' reads no '{name}' from there"
                )

    def encode(self, text: str) -> list[int]:
        text.encode()  # the library does not say that half of a surrogate pair is what it cannot read
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int]]:
        if not texts:
            return []
        keys = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        return list(self._tokenizer(list(texts), **keys)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, reply: bool = True) -> list[int]:
        return self.encode(self.chat_text(messages, reply=reply))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer in '{self._directory}' has no chat template: give prompts as plain text")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=reply,
                tools=[dict(tool) for tool in tools] or None,
                **self._arguments,
            )
        except Exception as e:  # templates are programs and raise what they like
            raise ValueError(f"the chat template refuses the messages: {' '.join(str(e).split())[:200]}") from e
        return str(text)

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in ids if i < self.vocab_size]
        # whatever the tokenizer's files say: "x = [ 1 , 2 ]" is what the policy wrote, and not "x = [ 1, 2 ]"
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token(self, id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(id) or "") if id < self.vocab_size else ""

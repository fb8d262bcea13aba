"""Reads a tokenizer from a SentencePiece model file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sentencepiece import SentencePieceProcessor

from megarl.data.messages import Messages


class SentencePieceTokenizer:
    """Reads a SentencePiece model: see `megarl.data.tokenizer.Tokenizer`. No text spells one of its control symbols.

    Raises:
        ValueError: the file is no SentencePiece model, or its vocabulary has no end-of-sequence token.
    """

    special_tokens: Mapping[str, int] = MappingProxyType({})

    def __init__(self, model_file: str) -> None:
        try:
            self._processor = SentencePieceProcessor(model_file=model_file)
        except (RuntimeError, OSError) as e:
            raise ValueError(f"'{model_file}' is not a readable SentencePiece model") from e
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError(f"'{model_file}' has no end-of-sequence token: responses could never end")

        bos_id, pad_id = self._processor.bos_id(), self._processor.pad_id()
        self.bos_id: int | None = bos_id if bos_id >= 0 else None
        self.pad_id: int | None = pad_id if pad_id >= 0 else None

    @property
    def model_proto(self) -> bytes:
        """Return the serialised model, as its file has it."""
        return bytes(self._processor.serialized_model_proto())

    def encode(self, text: str) -> list[int]:
        text.encode()  # the library does not say that half of a surrogate pair is what it cannot read
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int]]:
        return list(self._processor.encode(list(texts), num_threads=len(os.sched_getaffinity(0)))) if texts else []

    def encode_chat(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> list[int]:
        return self.encode_template(self.chat_text(messages, reply=reply, tools=tools))

    def encode_template(self, text: str) -> list[int]:
        return self.encode(text)

    def chat_text(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> str:
        del messages, reply, tools
        raise ValueError("a SentencePiece model has no chat template: give prompts as plain text")

    def decode(self, ids: Sequence[int]) -> str:
        # the library raises on ids of a padded vocabulary, which an untrained model does sample
        return str(self._processor.decode([i for i in ids if i < self.vocab_size]))

    def token(self, id: int) -> str:
        return str(self._processor.id_to_piece(id)) if id < self.vocab_size else ""

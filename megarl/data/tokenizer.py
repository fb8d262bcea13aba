"""What the program asks of a tokenizer, and how one is found on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megarl.data.tokenizer_huggingface import HuggingFaceTokenizer
from megarl.data.tokenizer_sentencepiece import SentencePieceTokenizer


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: ids are below this; the model's embedding may be padded beyond it.
        eos_id: ends a response.
    """

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int]]:
        """The same of many texts, by all CPUs that this process may use."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, reply: bool = True) -> list[int]:
        """Token ids of a conversation in the chat template.

        Args:
            messages: `role` and `content` each.
            reply: up to where the assistant's reply begins; false: up to where the last message ends.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as the chat template writes it.

        Args:
            tools: that the assistant may call, as JSON schemas.

        Raises:
            ValueError: as `encode_chat`.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text; special tokens and ids from vocab_size on leave nothing behind."""

    def token(self, id: int) -> str:
        """One token as the vocabulary spells it, special ones too; empty for ids from vocab_size on."""


def load_tokenizer(path: str, template_arguments: Mapping[str, Any] | None = None) -> Tokenizer:
    """Open a SentencePiece `.model` file, or a directory with a Hugging Face tokenizer or a `tokenizer.model`.

    Args:
        template_arguments: what the chat template is told beside the messages.

    Raises:
        ValueError: nothing there, nothing that can be read, or no chat template that reads such arguments.
    """
    if os.path.isdir(path):
        if any(os.path.isfile(os.path.join(path, name)) for name in ("tokenizer.json", "tokenizer_config.json")):
            return HuggingFaceTokenizer(path, template_arguments or {})
        model = os.path.join(path, "tokenizer.model")
        if not os.path.isfile(model):
            raise ValueError(f"'{path}' holds no tokenizer.json, tokenizer_config.json or tokenizer.model")
    elif os.path.isfile(path):
        model = path
    else:
        raise ValueError(f"no tokenizer at '{path}': set actor_rollout_ref.model.tokenizer_path")
    if template_arguments:
        raise ValueError(f"data.apply_chat_template_kwargs: '{model}' has no chat template")
    return SentencePieceTokenizer(model)

"""Declares what a tokenizer does, and opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megarl.data.messages import Messages
from megarl.data.tokenizer_huggingface import HuggingFaceTokenizer
from megarl.data.tokenizer_sentencepiece import SentencePieceTokenizer

_FAST = ("tokenizer.json", "tokenizer_config.json")
_SENTENCEPIECE = "tokenizer.model"
APART = "tokenizer"
"""Folder for the tokenizer within a model's, where transformers would read another one beside its `config.json`."""


class Tokenizer(Protocol):
    """Turns text into token ids and back. Pickled, it is the same one in another process.

    Attributes:
        vocab_size: ids are below this; the model's embedding may be padded beyond it.
        eos_id: ends a response.
        bos_id, pad_id: the tokens for a beginning and for padding; None where there is none.
        special_tokens: ids by the names that the vocabulary has for them. In texts the names stay text, unless the
            tokenizer was opened with `read_special_tokens`.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int | None
    special_tokens: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """Tokenise a text, without special tokens; raises ValueError for a text that cannot be read so."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int]]:
        """Tokenise many texts, by all CPUs that this process may use."""

    def encode_chat(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> list[int]:
        """Tokenise a conversation in the chat template.

        Args:
            messages: `role` and `content` each, and what else `data.messages.read_messages` leaves.
            reply: up to where the assistant's reply begins; false: up to where the last message ends.
            tools: that the assistant may call, as JSON schemas.

        Raises:
            ValueError: there is no chat template, it refuses the messages, or needs too much time or memory.
        """

    def chat_text(self, messages: Messages, *, reply: bool = True, tools: Messages = ()) -> str:
        """Write a conversation in the chat template, for `encode_template`.

        Special tokens that the messages spell are masked by words of letters and digits.

        Raises:
            ValueError: as `encode_chat`.
        """

    def encode_template(self, text: str) -> list[int]:
        """Tokenise what `chat_text` wrote, or a part: the template's special tokens as such, those of messages as text.

        Raises:
            ValueError: the two cannot be told apart.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; special tokens and ids from vocab_size on leave nothing behind."""

    def token(self, id: int) -> str:
        """Spell a token as the vocabulary does, special ones too; empty for ids from vocab_size on."""


def has_tokenizer(path: str) -> bool:
    """Tell whether `load_tokenizer` has something to open at a path."""
    place = tokenizer_place(path)
    return os.path.isfile(place) or any(os.path.isfile(os.path.join(place, name)) for name in (*_FAST, _SENTENCEPIECE))


def tokenizer_place(path: str) -> str:
    """Return the folder that has the tokenizer's files: `path`, or the one within it; a file is its own place."""
    apart = os.path.join(path, APART)
    return apart if os.path.isdir(apart) else path


def load_tokenizer(
    path: str, template_arguments: Mapping[str, Any] | None = None, *, read_special_tokens: bool = False
) -> Tokenizer:
    """Open a SentencePiece `.model` file, or a directory with a Hugging Face tokenizer or a `tokenizer.model`.

    Args:
        template_arguments: what the chat template is told beside the messages.
        read_special_tokens: special tokens that texts spell become these tokens.

    Raises:
        ValueError: nothing there, nothing that can be read, or no chat template that reads such arguments.
    """
    path = tokenizer_place(path)
    if os.path.isdir(path):
        if any(os.path.isfile(os.path.join(path, name)) for name in _FAST):
            return HuggingFaceTokenizer(path, template_arguments or {}, read_special_tokens=read_special_tokens)
        model = os.path.join(path, _SENTENCEPIECE)
        if not os.path.isfile(model):
            raise ValueError(f"'{path}' holds no {', '.join(_FAST)} or {_SENTENCEPIECE}")
    elif os.path.isfile(path):
        model = path
    else:
        raise ValueError(f"no tokenizer at '{path}': set actor_rollout_ref.model.tokenizer_path")
    if template_arguments:
        raise ValueError(f"data.apply_chat_template_kwargs: '{model}' has no chat template")
    return SentencePieceTokenizer(model)

"""Writes the files beside an export's weights, and checks that transformers reads the same token ids from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from megarl.checkpoint.huggingface_folder import (
    TokenIds,
    copy_further_layers,
    copy_model_files,
    end_tokens,
    move_tokenizer,
    read_config,
)
from megarl.data.tokenizer import APART, Tokenizer, has_tokenizer, load_tokenizer, tokenizer_place
from megarl.data.tokenizer_huggingface import HuggingFaceTokenizer
from megarl.data.tokenizer_sentencepiece import SentencePieceTokenizer
from megarl.data.tokenizer_sentencepiece_export import write_huggingface_tokenizer
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture

TEXTS = (
    "a",
    " a",
    "  two  blanks  ",
    "one\ntwo\n\n\tthree",
    "1234567890 + 10 =",
    "Grüße, Straße",
    "🙂 and 🙂🙂",
    "Hello, World! it's",
)
"""Every export is compared on these texts, beside its special tokens and a conversation."""
CONVERSATION = ({"role": "user", "content": "What is 7 times 8?"},)
ASKED = 4
"""Texts, from the first on, whose answers are compared."""
ASK_APART = "give that folder to AutoTokenizer, and as --tokenizer to vLLM"
MOST_SPECIAL = 32
"""Special tokens that are compared; some models have hundreds in reserve."""


def export_model_files(
    source: str,
    tokenizer: str,
    target: str,
    *,
    dtype: str,
    stop_tokens: Sequence[int] | None = None,
    classifier: bool = False,
) -> list[str]:
    """Write all files but the weights into an existing folder, and compare transformers' reading of them with ours.

    Layers for multi-token prediction, which are not trained, are written, too.

    Args:
        source: folder with `config.json`.
        tokenizer: folder of the tokenizer, or a SentencePiece .model file.
        dtype: of the weights, such as "bfloat16".
        stop_tokens: ids that end a response; None: the tokenizer's end token and those that `source` names.
        classifier: the target is a sequence classifier with one label, whatever the source is.

    Returns:
        remarks for readers of the folder.

    Raises:
        ValueError: the tokenizer cannot be written so, or a text's ids differ; names the text and both.
    """
    tokenizer = tokenizer_place(tokenizer)
    further = not classifier and copy_further_layers(source, target)
    copy = partial(
        copy_model_files, source, tokenizer, target, dtype=dtype, classifier=classifier, further_layers=further
    )
    if not has_tokenizer(tokenizer):
        copy()
        return []
    ours = load_tokenizer(tokenizer)
    copy(token_ids=token_ids(source, tokenizer, ours, stop_tokens))
    if isinstance(ours, SentencePieceTokenizer):
        write_huggingface_tokenizer(ours, target)
    try:
        exported, remarks = _compared(ours, target), []
    except ValueError as e:
        exported, remarks = _compared(ours, move_tokenizer(target, APART)), [f"{e}; it is in {APART}/: {ASK_APART}"]
    alone = exported.encode_alone(TEXTS[0])
    if alone != ours.encode(TEXTS[0]):
        remarks.append(
            f"transformers and vLLM read {TEXTS[0]!r} as {list(map(exported.token, alone))}, with tokens that training "
            f"did not put there: ask for plain texts with add_special_tokens=false (a chat template says its own)"
        )
    return remarks


def keep_tokenizer(source: str, tokenizer: str, target: str) -> None:
    """Put a copied tokenizer that is not that of `source` into a folder of its own.

    Beside the `config.json` of `source` transformers could read it as another tokenizer.
    """
    if os.path.isdir(tokenizer) and not os.path.samefile(source, tokenizer):
        move_tokenizer(target, APART)


def prompts_of(folder: str, arch: Architecture) -> tuple[dict[str, list[int]], list[int]]:
    """Choose prompts, token ids by text, and the ids that end an answer.

    For a folder without a tokenizer the prompts are two sequences of ids.
    """
    stop_tokens = end_tokens(folder, arch.vocab_size)
    if not has_tokenizer(folder):
        prompts = [[i % arch.vocab_size for i in ids] for ids in ([3, 1, 2], [5, 8, 13, 21, 34])]
        return {f"the ids {ids}": ids for ids in prompts}, stop_tokens
    tokenizer = load_tokenizer(folder)
    return {text: tokenizer.encode(text) for text in TEXTS[:ASKED]}, stop_tokens


def token_ids(
    source: str, tokenizer_path: str, tokenizer: Tokenizer, stop_tokens: Sequence[int] | None = None
) -> TokenIds:
    """Choose the token ids for a model's configurations; without them transformers takes those of its family.

    Args:
        source, stop_tokens: as in `export_model_files`.
    """
    config = read_config(source)
    if stop_tokens is None:
        vocab_size = read_architecture(source).vocab_size
        stop_tokens = tuple(dict.fromkeys((tokenizer.eos_id, *end_tokens(source, vocab_size))))
    same_folder = os.path.samefile(source, tokenizer_path)

    def named(role: str, i: int | None) -> int | None:
        """Take the tokenizer's id, or the configuration's if the tokenizer names none and lies beside it."""
        if i is None and same_folder and isinstance(config.get(role), int) and 0 <= config[role] < tokenizer.vocab_size:
            return int(config[role])
        return i

    return {
        "bos_token_id": named("bos_token_id", tokenizer.bos_id),
        "eos_token_id": stop_tokens[0] if len(stop_tokens) == 1 else list(stop_tokens),
        "pad_token_id": named("pad_token_id", tokenizer.pad_id),
    }


def _compared(ours: Tokenizer, folder: str) -> HuggingFaceTokenizer:
    """Load the tokenizer of a folder. Raises ValueError if it reads or writes a text otherwise than ours."""
    exported = load_tokenizer(folder)
    assert isinstance(exported, HuggingFaceTokenizer)
    special = [ours.token(ours.eos_id), *exported.special_tokens][:MOST_SPECIAL]
    for text in (*TEXTS, *(f"a{name}b" for name in special)):
        ids = _ids(ours, text)
        _require_same(repr(text), _ids(exported, text), ids)
        if ids is not None:
            _require_same(f"the tokens {ids}", exported.decode(ids), ours.decode(ids))
    try:
        chat = ours.encode_chat(CONVERSATION)
    except ValueError:
        return exported  # no chat template, or one for other conversations
    _require_same(f"the conversation {list(CONVERSATION)}", exported.encode_chat(CONVERSATION), chat)
    return exported


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Encode a text into token ids; None if the tokenizer refuses it, because it makes a special token of it."""
    try:
        return tokenizer.encode(text)
    except ValueError:
        return None


def _require_same(what: str, exported: object, ours: object) -> None:
    if exported != ours:
        raise ValueError(
            f"the exported tokenizer differs from training's: transformers reads {what} as {exported!r}, training as "
            f"{ours!r}"
        )

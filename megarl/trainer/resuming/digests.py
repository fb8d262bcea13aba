"""Short names for contents, to tell them apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from megarl.data.tokenizer import tokenizer_place


def tokenizer_digest(path: str) -> str:
    """Of a SentencePiece model file, or of the tokenizer's files in a folder."""
    path = tokenizer_place(path)
    if os.path.isfile(path):
        return file_digest(path) or ""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    own = [
        n for n in names if n.startswith(("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_"))
    ]
    return digest(f"{name} {file_digest(os.path.join(path, name))}".encode() for name in own)


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()


def file_digest(path: str) -> str | None:
    """Of a file's contents; None where there is none."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as f:
        return digest([f.read()])

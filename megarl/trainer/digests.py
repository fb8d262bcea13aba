"""Digests files and values, to tell contents apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from megarl.data.tokenizer import tokenizer_place


def tokenizer_digest(path: str) -> str:
    """Digest a SentencePiece model file, or the tokenizer's files in a folder."""
    path = tokenizer_place(path)
    if os.path.isfile(path):
        return file_digest(path) or ""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    beginnings = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_")
    files = [name for name in names if name.startswith(beginnings)]
    return digest(f"{name} {file_digest(os.path.join(path, name))}".encode() for name in files)


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Digest byte strings in order into 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()


def file_digest(path: str) -> str | None:
    """Digest a file's contents; None where there is no file."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as f:
        return digest([f.read()])


def code_digest(function: Any) -> str | None:
    """Digest a function's bytecode and constants, with those of functions within it, under the Python that runs; None
    where it has none, as one of a library in C."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return digest(_parts_of(code)) if code is not None else None


def _parts_of(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)
        else:  # the order of a set of texts is another one in each process
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()

"""Bounds how much longer a text becomes on its way through a Hugging Face tokenizer."""

from __future__ import annotations

import base64
import json
from math import prod
from pathlib import Path
from typing import Any

MOST_GROWTH = 1000
"""Characters that all steps together may make of one."""

_STEPS = ("normalizer", "pre_tokenizer", "decoder")
_LISTS = ("normalizers", "pretokenizers", "decoders")


def check_growth(directory: str) -> None:
    """Raise ValueError if a tokenizer.json in a folder, of whatever version, multiplies text."""
    for path in sorted(Path(directory).glob("tokenizer*.json")):
        try:
            content = json.loads(path.read_bytes()) if path.is_file() else {}
        except (OSError, ValueError, RecursionError):
            continue  # the library says what is wrong with it
        steps = [_growth(content.get(name)) for name in _STEPS] if isinstance(content, dict) else []
        if prod(steps) > MOST_GROWTH:
            raise ValueError(f"'{path}' makes more than {MOST_GROWTH} characters of one: its steps multiply text")


def _growth(step: Any) -> int:
    """Return the most characters that a step makes of one."""
    if not isinstance(step, dict):
        return 1
    inner = [part for name in _LISTS if isinstance(parts := step.get(name), list) for part in parts]
    return prod(map(_growth, inner), start=_own_growth(step))


def _own_growth(step: dict[str, Any]) -> int:
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # an expression, or no text at all, may match between any two characters
        return max(1, -(-len(content) // len(text))) if isinstance(text, str) and text else 1 + len(content)
    if kind == "Prepend" and isinstance(prefix := step.get("prepend"), str):
        return 1 + len(prefix)
    if kind == "Precompiled" and isinstance(blob := step.get("precompiled_charsmap"), str):
        return _longest(blob)
    return 2 if kind == "ByteLevel" else 1


def _longest(blob: str) -> int:
    """Return the longest text in SentencePiece's table of replacements: texts that end with NUL behind a trie."""
    try:
        table = base64.b64decode(blob)
    except ValueError:
        return 1
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))

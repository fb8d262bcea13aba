"""Tells special tokens from texts that spell them: `<|im_end|>` in a user's message is text, and does not end it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MASK = "megarlspecial"
_MASKED = re.compile(f"{_MASK}(\\d+)x")


class SpecialTokens:
    """Puts masks in place of the special tokens that texts spell: words that a chat template leaves as they are.

    Args:
        ids: by name.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {name: ids[name] for name in sorted(ids, key=len, reverse=True) if name}
        self._names = [_MASK, *self.ids]  # a text that spells a mask is masked itself
        self._places = {name: place for place, name in enumerate(self._names)}
        self._spelt = re.compile("|".join(map(re.escape, self._names)))
        self._written = re.compile("({})".format("|".join(map(re.escape, self.ids)) or "(?!)"))

    def in_text(self, text: str) -> bool:
        """Tell whether a text spells a special token."""
        return self._written.search(text) is not None

    def masked(self, value: Any) -> Any:
        """Put masks in place of the special tokens that a text spells, or that all texts in messages spell."""
        if isinstance(value, str):
            return self._spelt.sub(lambda found: f"{_MASK}{self._places[found[0]]}x", value)
        if isinstance(value, Mapping):
            return {self.masked(key): self.masked(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.masked(inner) for inner in value]
        return value

    def unmasked(self, text: str) -> str:
        """Put special tokens in place of the masks of a text."""
        return _MASKED.sub(lambda found: self._names[int(found[1])], text)

    @staticmethod
    def has_masks(text: str) -> bool:
        return _MASK in text

    def parts(self, text: str) -> list[str]:
        """Split a text into texts and names of special tokens that are not masked, in turns; the first is a text."""
        return self._written.split(text)

"""Finds stop strings in token ids: the same rule for every engine and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

MARGIN = 8
"""Tokens decoded before those that a stop string can span: where decoding begins, a character may be incomplete, and
SentencePiece drops a leading space."""


class StopStrings:
    """Tells whether a response is complete because its text holds one of some strings.

    The response keeps the token that completes the string, whatever comes after it in that token's text.

    Args:
        strings: none of them empty.
        decode: of the model's tokenizer.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._decode = tuple(strings), decode
        # a token that leaves text behind is at least one byte of it
        self._window = max((len(s.encode()) for s in strings), default=0) + MARGIN

    def found(self, token_ids: Sequence[int], since: int = 0) -> str | None:
        """Return the string that the newest token completes, or None. Call it after every token of a response.

        Args:
            since: place of the first token that counts: what was said before is not looked at.
        """
        if not self._strings:
            return None
        text = self._decode(token_ids[max(since, len(token_ids) - self._window) :])
        return next((s for s in self._strings if s in text), None)

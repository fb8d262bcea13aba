"""Decodes single tokens, so that their texts joined are the text of the sequence."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.tokenizer import Tokenizer

_HALF = "\ufffd"  # what decoding makes of a part of a character


class Pieces:
    """Decodes single tokens, and looks each token of a vocabulary up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._known = tokenizer, dict[int, str]()
        self._before: tuple[list[int], str] | None = None

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each token: a special token's as the vocabulary spells it.

        The text of a character that several tokens make up is the first one's, and the others have none: the bytes
        E2, 82, AC give "€", "", "".
        """
        pieces = [piece if (piece := self._known.get(i)) is not None else self._look_up(i) for i in ids]
        start = None
        for place in range(len(pieces) + 1):
            half = place < len(pieces) and _HALF in pieces[place]
            if half and start is None:
                start = place
            elif not half and start is not None:
                pieces[start:place] = [self._after_another(ids[start:place]), *[""] * (place - start - 1)]
                start = None
        return pieces

    def _look_up(self, token_id: int) -> str:
        piece = self._after_another([token_id]) or self.tokenizer.token(token_id)
        self._known[token_id] = piece
        return piece

    def _after_another(self, ids: Sequence[int]) -> str:
        """Return the text that tokens add to a token before them: alone, a word's token would lose its space."""
        if self._before is None:
            ids_before = self.tokenizer.encode("a")[-1:]
            self._before = ids_before, self.tokenizer.decode(ids_before)
        ids_before, before = self._before
        return self.tokenizer.decode([*ids_before, *ids]).removeprefix(before)

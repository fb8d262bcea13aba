"""Tokenises the prompts whose tokens alone tell whether they can be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from megarl.data.encode import Conversation, TooLong, encode_prompt, usable_ids
from megarl.data.scan import Scan, Unsettled
from megarl.data.tokenizer import Tokenizer


class Settler:
    """Tokenises prompts, except those that certainly fit, as an earlier prompt with the same roles tells."""

    def __init__(self, scan: Scan, tokenizer: Tokenizer, *, together: bool) -> None:
        """
        Args:
            together: texts are handed to the tokenizer many at a time, which has threads for them.
        """
        self._scan, self._tokenizer, self._together = scan, tokenizer, together
        self._templates: dict[tuple[str, ...], int] = {}

    def settle(self, prompts: list[Unsettled]) -> Iterator[tuple[Unsettled, tuple[int, ...] | None]]:
        """Yield the prompts that had to be tokenised, with their tokens; None for one to leave out as too long.

        Raises:
            ValueError: the first prompt that cannot be used, and that no key leaves out.
        """
        prompts = [prompt for prompt in prompts if prompt.refusal or not self._fits(prompt.prompt)]
        for prompt, ids in zip(prompts, self._encoded(prompts), strict=True):
            try:
                tokens = usable_ids(ids, prompt.source, self._scan.data)
            except TooLong:
                if not self._scan.data.filter_overlong_prompts:
                    raise
                yield prompt, None
                continue
            if prompt.refusal:
                raise ValueError(prompt.refusal)
            yield prompt, tokens

    def _fits(self, prompt: str | Conversation) -> bool:
        """Return whether a conversation certainly fits, as others with the same roles did.

        A conversation is put into the template the first time that its roles are seen; and, with "a" for every text,
        to see how many tokens it adds. 16 more are for what may be split otherwise where its words meet the text.
        """
        if isinstance(prompt, str) or prompt.tools:
            return False
        messages = prompt.messages
        if not all(
            message.keys() == {"role", "content"} and all(isinstance(text, str) for text in message.values())
            for message in messages
        ):
            return False
        roles = tuple(message["role"] for message in messages)
        if roles in self._templates:
            return self._scan.fits(" ".join(message["content"] for message in messages), self._templates[roles])
        with suppress(ValueError):  # the row that comes next says so, with its name
            short = [{"role": role, "content": "a"} for role in roles]
            self._templates[roles] = len(self._tokenizer.encode_chat(short)) + 16
        return False

    def _encoded(self, prompts: list[Unsettled]) -> Iterator[list[int]]:
        texts = [prompt.prompt for prompt in prompts if isinstance(prompt.prompt, str)]
        if self._together and len(texts) == len(prompts):
            with suppress(Exception):  # one by one, the row that it fails at has a name
                return iter(self._tokenizer.encode_batch(texts))
        return (encode_prompt(prompt.prompt, prompt.source, self._tokenizer) for prompt in prompts)

"""Turns texts for the policy into token ids. The policy's own replies are never tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from megarl.data.conversations import REPLY
from megarl.data.encode import check_nothing_is_left_out
from megarl.data.messages import are_messages, read_messages
from megarl.data.tokenizer import Tokenizer

Message = Mapping[str, Any]

_CUT = " [cut]"
_LONGEST_TOKEN = 128  # characters of a text that are tokenised for each token that is kept


class Speech:
    """Tokenises observations and messages for the policy.

    Args:
        stop_tokens: those that can end a reply.
        role: of an observation, in a chat.
        limit: tokens of an observation.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_tokens: Sequence[int], role: str, limit: int) -> None:
        self.tokenizer, self._stop_tokens, self._role, self._limit = tokenizer, frozenset(stop_tokens), role, limit
        self._cut = tokenizer.encode(_CUT)[:limit]

    def opening(
        self,
        prompt: object,
        observation: str | Sequence[int],
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Message] = (),
    ) -> list[int]:
        """Tokenise a prompt and an environment's first observation after it.

        Args:
            prompt: the row's, text or messages.
            tools: that the row offers.
        """
        if are_messages(prompt) and isinstance(observation, str):
            assert isinstance(prompt, list)
            message = {"role": self._role, "content": self._shortened(observation)}
            return self.tokenizer.encode_chat([*read_messages(prompt, "the prompt"), message], tools=tools)
        return [*prompt_ids, *self._plain(observation)]

    def answer(self, observation: str | Sequence[int], *, chat: bool, last: int) -> list[int]:
        """Tokenise an observation with the chat template's text around it, up to where the reply begins.

        Args:
            last: the last token of the policy's reply.
        """
        if chat and isinstance(observation, str):
            return self.messages([{"role": self._role, "content": self._shortened(observation)}], last=last)
        return self._plain(observation)

    def conversation(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> list[int]:
        """Tokenise messages up to where the policy's reply begins.

        Raises:
            ValueError: the chat template refuses them, or leaves something out.
        """
        check_nothing_is_left_out(messages, self.tokenizer, tools=tools)
        return self.tokenizer.encode_chat(messages, tools=tools)

    def messages(self, messages: Sequence[Message], *, last: int, tools: Sequence[Message] = ()) -> list[int]:
        """Tokenise the messages after a reply, from its end up to where the next reply begins.

        Raises:
            ValueError: the chat template refuses them, leaves something out, or does not write the reply down.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]
        check_nothing_is_left_out([*before, *messages], self.tokenizer)
        text = self.tokenizer.chat_text([*before, *messages], tools=tools)
        _, reply, rest = text.partition(REPLY)
        if not reply:
            raise ValueError("the chat template does not write down what the assistant said before: use plain prompts")
        ids = self.tokenizer.encode_template(rest)
        # a reply that ended by itself has its end token already; one that was cut off, or ended by a string, has not
        return ids[1:] if ids and ids[0] == last and last in self._stop_tokens else ids

    def _plain(self, observation: str | Sequence[int]) -> list[int]:
        if isinstance(observation, str):
            ids = self.tokenizer.encode(observation[: self._limit * _LONGEST_TOKEN])
        else:
            ids = [index(token) for token in observation]  # int() would take 1.5 for token 1
            if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
                raise ValueError(f"observed token ids that the vocabulary of {self.tokenizer.vocab_size} does not have")
        return ids if len(ids) <= self._limit else [*ids[: self._limit - len(self._cut)], *self._cut]

    def _shortened(self, observation: str) -> str:
        ids = self.tokenizer.encode(observation[: self._limit * _LONGEST_TOKEN])
        if len(ids) <= self._limit:
            return observation
        return self.tokenizer.decode(ids[: self._limit - len(self._cut)]) + _CUT

"""Conversations, cut into what is read and what is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.data.encode import encode_messages
from megarl.data.examples import Turns
from megarl.data.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]


def turns_of(messages: Messages, learnt: Sequence[int], source: str, tokenizer: Tokenizer) -> Turns:
    """Tokens of a conversation in the chat template, up to the last message that is learnt.

    The conversation is encoded up to the reply and up to its end, for every message that is learnt: what comes between
    are the reply's tokens. They end with its end token; what the template puts after that ("\\n") is only read.

    Args:
        learnt: which messages, in rising order; each is one of the assistant.
        source: of the row, for messages.

    Raises:
        ValueError: the template refuses the messages, writes nothing before or within a reply, or writes the beginning
            of a conversation otherwise when it goes on: then nobody can tell which tokens are whose.
    """
    turns: list[tuple[int, ...]] = []
    seen: list[int] = []
    at = 0
    for i in learnt:
        before = encode_messages(messages[:i], source, tokenizer)
        whole = encode_messages(messages[: i + 1], source, tokenizer, reply=False)
        if before[: len(seen)] != seen or whole[: len(before)] != before:
            raise ValueError(
                f"{source}: the chat template writes what comes before message {i + 1} otherwise than in the whole "
                f"conversation, so that its tokens cannot be told apart; use a template that leaves earlier messages "
                f"as they are"
            )
        end = _end(whole, len(before), tokenizer.eos_id)
        if end == len(before) or not before:
            raise ValueError(
                f"{source}: the chat template writes nothing {'for' if before else 'before'} message {i + 1}"
            )
        turns += [tuple(before[at:]), tuple(whole[len(before) : end])]
        seen, at = whole, end
    return tuple(turns)


def _end(ids: Sequence[int], start: int, eos_id: int) -> int:
    """Behind the last end token from `start` on; where there is none, all of it."""
    return next((i + 1 for i in range(len(ids) - 1, start - 1, -1) if ids[i] == eos_id), len(ids))

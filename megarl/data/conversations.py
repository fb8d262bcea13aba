"""Cuts conversations into what is read and what is learnt."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.encode import encode_messages
from megarl.data.examples import Turns
from megarl.data.messages import Messages, read_messages
from megarl.data.tokenizer import Tokenizer

REPLY = "megarlreply"
"""Stands for the assistant's message; nothing that a template writes by itself."""


def turns_of(
    messages: Messages, learnt: Sequence[int], source: str, tokenizer: Tokenizer, *, tools: Messages = ()
) -> Turns:
    """Tokenise a conversation in the chat template, up to the last message that is learnt.

    The conversation is encoded up to the reply and up to its end, for every message that is learnt: what comes between
    are the reply's tokens. They end with its end token; what the template puts after that ("\\n") is only read.

    Args:
        learnt: which messages, in rising order; each is one of the assistant.
        source: of the row, for messages.
        tools: that the row offers.

    Raises:
        ValueError: the template refuses the messages, writes nothing before or within a reply, or writes the beginning
            of a conversation otherwise when it goes on: then nobody can tell which tokens are whose.
    """
    turns: list[tuple[int, ...]] = []
    seen: list[int] = []
    at = 0
    for i in learnt:
        before = encode_messages(messages[:i], source, tokenizer, tools=tools)
        whole = encode_messages(messages[: i + 1], source, tokenizer, reply=False, tools=tools)
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


def conversation_ids(
    messages: Messages, reply: str, source: str, tokenizer: Tokenizer, *, ended: bool, tools: Messages = ()
) -> list[int]:
    """Tokenise a conversation and the reply to it, up to where `turns_of` has a model learn it.

    Args:
        source: of the row, for messages.
        ended: whether the reply ended by itself. A reply that was cut off gets no end token, which would say that it is
            finished.

    Raises:
        ValueError: the template refuses the messages.
    """
    messages = read_messages(messages, source)
    whole = encode_messages([*messages, _assistant(reply)], source, tokenizer, reply=False, tools=tools)
    if ended:
        before = encode_messages(messages, source, tokenizer, tools=tools)
        pairs = zip(before, whole, strict=False)
        start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(whole)))
        return whole[: _end(whole, start, tokenizer.eos_id)]
    _, _, behind = tokenizer.chat_text([*messages, _assistant(REPLY)], reply=False, tools=tools).rpartition(REPLY)
    text = tokenizer.chat_text([*messages, _assistant(reply)], reply=False, tools=tools)
    return tokenizer.encode_template(text.removesuffix(behind))


def _assistant(reply: str) -> dict[str, str]:
    return {"role": "assistant", "content": reply}


def _end(ids: Sequence[int], start: int, eos_id: int) -> int:
    """Return the place behind the last end token from `start` on; without one, the length."""
    return next((i + 1 for i in range(len(ids) - 1, start - 1, -1) if ids[i] == eos_id), len(ids))

"""Conversations with the policy as token ids: what it sampled stays as it was, whatever a client makes of the text."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.environments.speech import Speech
from megarl.rollout.chat_request import Asked, Message, Refused, reply_message, response_body, same_message, sampling
from megarl.rollout.engine import Request
from megarl.rollout.episodes import Played, seed_of
from megarl.rollout.replicas import sample_seed
from megarl.types import Completion, Episode, Rollout, SamplingParams


@dataclass(kw_only=True, eq=False)
class Segment:
    """A conversation that only grew: one response to train on.

    Attributes:
        key: of its requests.
        messages: so far, with the policy's.
        tools: that were offered, as JSON.
        busy: whether a reply is being drawn.
        turns: replies.
        at_limit: whether the newest reply, or what should have followed it, met the length of a response.
    """

    key: int
    seed: int
    tools: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logp: array[float] = field(default_factory=lambda: array("f"))
    sampled: bytes = b""
    busy: bool = False
    turns: int = 0
    at_limit: bool = False

    def continued_by(self, asked: Asked) -> bool:
        """Whether a request goes on with it."""
        known = len(self.messages)
        if self.busy or not self.turns or len(asked.messages) <= known or self.tools != _json(asked.tools):
            return False
        return all(same_message(a, b) for a, b in zip(self.messages, asked.messages[:known], strict=True))


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A reply that is being drawn.

    Attributes:
        observed: token ids between the segment's end and the reply.
    """

    segment: Segment
    asked: Asked
    observed: tuple[int, ...]
    request: Request
    began: float


class Session:
    """The conversations of one episode. Not for several threads at a time.

    Args:
        params: how the run draws tokens; `max_tokens` bounds a segment's response.
        max_turns: replies of the episode.
        new_key: a number for a segment's requests.
    """

    def __init__(
        self,
        rollout: Rollout,
        params: SamplingParams,
        *,
        speech: Speech,
        max_turns: int,
        max_prompt_length: int,
        new_key: Callable[[], int],
    ) -> None:
        self._rollout, self.params, self._speech = rollout, params, speech
        self._max_turns, self._max_prompt_length, self._new_key = max_turns, max_prompt_length, new_key
        self._segments: list[Segment] = []
        self._made = self._replies = 0
        self._limited = False
        self.waited = 0.0
        self.closed = False

    def ask(self, asked: Asked) -> Ticket:
        """What the engine is to be asked.

        Raises:
            Refused: a limit is met, or the chat template refuses the messages.
        """
        self._check_open()
        if self._replies >= self._max_turns:
            self._limited = True
            raise Refused(
                f"the episode has had its environment.max_turns = {self._max_turns} replies", code="max_turns"
            )
        segment = next((s for s in reversed(self._segments) if s.continued_by(asked)), None)
        try:
            if segment is None:
                segment, observed = self._begin(asked), []
            else:
                new = asked.messages[len(segment.messages) :]
                observed = self._speech.messages(new, last=segment.token_ids[-1], tools=asked.tools)
        except Refused:
            raise
        except ValueError as e:
            raise Refused(str(e), param="messages") from e
        begun = len(segment.token_ids) + len(observed)
        if begun >= self.params.max_tokens:
            segment.at_limit = self._limited = True
            raise Refused(
                f"the conversation has {begun} tokens after its first messages, and data.max_response_length = "
                f"{self.params.max_tokens} leaves no room for a reply",
                param="messages",
                code="context_length_exceeded",
            )
        segment.busy = True
        self._replies += 1
        request = Request(
            key=segment.key,
            prompt=segment.prompt_ids,
            params=sampling(self.params, asked, begun),
            seed=segment.seed if asked.seed is None else sample_seed(segment.seed, asked.seed, 0, 0),
            token_ids=segment.token_ids + array("i", observed),
            logp=segment.logp + array("f", [0.0] * len(observed)),
            turn_start=begun,
            keep=True,
        )
        return Ticket(segment=segment, asked=asked, observed=tuple(observed), request=request, began=time.monotonic())

    def reply(self, ticket: Ticket, completion: Completion) -> dict[str, Any]:
        """The answer in OpenAI's form; the tokens become the segment's.

        Raises:
            Refused: the episode is over.
        """
        self._check_open()
        segment, begun = ticket.segment, ticket.request.turn_start
        said = completion.token_ids[begun:]
        self.waited += time.monotonic() - ticket.began
        segment.sampled += b"\x00" * len(ticket.observed) + b"\x01" * len(said)
        segment.token_ids, segment.logp = completion.token_ids, completion.logp
        segment.turns += 1
        segment.busy = False
        segment.at_limit = completion.finish_reason == "length" and len(segment.token_ids) >= self.params.max_tokens
        self._segments.remove(segment)  # the newest is the last: it is the one that is scored
        self._segments.append(segment)
        number = f"{segment.key}-{segment.turns}"
        message = reply_message(self._speech.tokenizer.decode(said), ticket.asked, number)
        segment.messages = (*ticket.asked.messages, _as_read(message))
        reason = "length" if completion.finish_reason == "length" else "stop"
        prompt = len(segment.prompt_ids) + begun
        return response_body(message, reason, number=number, prompt=prompt, reply=len(said))

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for the reply any more: the segment stays as it was before."""
        self.waited += time.monotonic() - ticket.began
        segment = ticket.segment
        segment.busy, segment.key = False, self._new_key()
        if not segment.turns:
            self._segments.remove(segment)

    def close(self, *, reward: float | None, error: str | None, seconds: float) -> list[Played]:
        """What there is to train on; nothing is added to it any more.

        Args:
            reward: of the episode; None: it is scored later.
            error: why the episode failed; None: it did not.
            seconds: that it took, of which the policy took `waited`.
        """
        self.closed = True
        segments = [segment for segment in self._segments if segment.turns]
        if not segments:
            episode = Episode(turns=0, seconds=seconds, error=error or "agent: asked for no response")
            return [Played(episode=episode)]
        return [
            Played(
                prompt_ids=segment.prompt_ids,
                token_ids=segment.token_ids,
                logp=segment.logp,
                sampled=segment.sampled,
                finish_reason="length" if segment.at_limit else "stop",
                reward=None if error else reward,
                episode=Episode(
                    turns=segment.turns,
                    seconds=max(0.0, seconds - self.waited) if segment is segments[-1] else 0.0,
                    limited=segment.at_limit or (self._limited and segment is segments[-1]),
                    error=error,
                ),
            )
            for segment in segments
        ]

    @property
    def keys(self) -> list[int]:
        """Of its segments."""
        return [segment.key for segment in self._segments]

    def _begin(self, asked: Asked) -> Segment:
        tokenizer = self._speech.tokenizer
        ids = tuple(tokenizer.encode_chat(asked.messages, tools=asked.tools))
        if len(ids) > self._max_prompt_length:
            raise Refused(
                f"the messages have {len(ids)} tokens, more than data.max_prompt_length = {self._max_prompt_length}",
                param="messages",
                code="context_length_exceeded",
            )
        seed = seed_of(self._rollout.seed, self._made)
        self._made += 1
        self._segments.append(Segment(key=self._new_key(), seed=seed, tools=_json(asked.tools), prompt_ids=ids))
        return self._segments[-1]

    def _check_open(self) -> None:
        if self.closed:
            raise Refused("the episode is over", status=410)


def _as_read(message: Message) -> Message:
    """Our own message as a client's is read."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    read = [{**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in calls]
    return {**message, "tool_calls": read}


def _json(tools: Sequence[Message]) -> str:
    return json.dumps(tools, sort_keys=True)

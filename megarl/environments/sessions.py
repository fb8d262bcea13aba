"""Keeps conversations with the policy as token ids: sampled tokens stay as they are, however a client changes texts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.data.messages import Message, read_messages
from megarl.environments.chat_reply import ChatReply, reply_message
from megarl.environments.chat_request import ChatRequest, Refused, same_message, sampling
from megarl.environments.episodes import Played, seed_of
from megarl.environments.speech import Speech
from megarl.rollout.engine import Request
from megarl.rollout.replicas import sample_seed
from megarl.types import Completion, Episode, Rollout, SamplingParams, Tokens

_TOO_LONG = "context_length_exceeded"


@dataclass(kw_only=True, eq=False)
class Segment:
    """Holds a conversation that only grew: one response to train on.

    Attributes:
        key: of its requests to the engine.
        messages: so far, with the policy's.
        tools: the tools that the client offered, as JSON.
        busy: whether a reply is being drawn.
        turns: how many replies it has.
        at_limit: whether the newest reply, or the messages after it, reached the greatest length of a response.
    """

    key: int
    seed: int
    tools: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    response: Tokens = field(default_factory=Tokens)
    busy: bool = False
    turns: int = 0
    at_limit: bool = False

    def continued_by(self, chat: ChatRequest) -> bool:
        """Return whether a request goes on with this conversation."""
        known = len(self.messages)
        if self.busy or not self.turns or len(chat.messages) <= known or self.tools != _json(chat.tools):
            return False
        return all(same_message(a, b) for a, b in zip(self.messages, chat.messages[:known], strict=True))


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Holds a reply that is being drawn."""

    segment: Segment
    chat: ChatRequest
    request: Request
    began: float


class Session:
    """Holds the conversations of one episode. Only one thread may use it at a time.

    Args:
        params: how the run draws tokens; `max_tokens` bounds a segment's response.
        max_turns: most replies of the episode.
        new_key: makes a number for a segment's requests.

    Attributes:
        waited: seconds for which clients waited for the policy.
        closed: whether the episode is over.
        at_limit: whether the client's last answer says that a limit of the episode is met.
        earlier: messages up to each reply, by the reply's number.
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
        self._begun = self._replies = 0
        self._limited = False
        self.waited = 0.0
        self.closed = self.at_limit = False
        self.earlier: dict[str, Sequence[Message]] = {}

    def ask(self, chat: ChatRequest, *, anew: bool = False) -> Ticket:
        """Make the engine's request for a reply.

        Args:
            anew: begin a segment, even if the messages go on with one.

        Raises:
            Refused: a limit is met, or the chat template refuses the messages.
        """
        self._check_open()
        if self._replies >= self._max_turns:
            raise self._limit(
                f"the episode has had its environment.max_turns = {self._max_turns} replies", code="max_turns"
            )
        goes_on = (segment for segment in reversed(self._segments) if segment.continued_by(chat))
        segment = None if anew else next(goes_on, None)
        try:
            if segment is None:
                segment = self._begin(chat)
                response = segment.response
            else:
                new, last = chat.messages[len(segment.messages) :], segment.response.ids[-1]
                response = segment.response.observed(self._speech.messages(new, last=last, tools=chat.tools))
        except Refused:
            raise
        except ValueError as e:
            raise Refused(str(e), param="messages") from e
        begun = len(response)
        if begun >= self.params.max_tokens:
            segment.at_limit = True
            raise self._limit(
                f"the conversation has {begun} tokens after its first messages, and data.max_response_length = "
                f"{self.params.max_tokens} leaves no room for a reply"
            )
        segment.busy = True
        self._replies += 1
        self.at_limit = False
        request = Request(
            key=segment.key,
            prompt=segment.prompt_ids,
            params=sampling(self.params, chat, begun),
            seed=segment.seed if chat.seed is None else sample_seed(segment.seed, chat.seed, 0, 0),
            response=response,
            turn_start=begun,
            keep=True,
        )
        return Ticket(segment=segment, chat=chat, request=request, began=time.monotonic())

    def reply(self, ticket: Ticket, completion: Completion) -> ChatReply:
        """Make the client's answer of a completion, whose tokens become the segment's.

        Raises:
            Refused: the episode is over.
        """
        self._check_open()
        segment, begun, response = ticket.segment, ticket.request.turn_start, completion.response
        ids = response.ids[begun:]
        self.waited += time.monotonic() - ticket.began
        segment.response = response
        segment.turns += 1
        segment.busy = False
        segment.at_limit = completion.finish_reason == "length" and len(response) >= self.params.max_tokens
        self._segments.remove(segment)  # the newest is the last, which is scored
        self._segments.append(segment)
        self.at_limit = segment.at_limit
        number, decode = f"{segment.key}-{segment.turns}", self._speech.tokenizer.decode
        message = reply_message(decode(ids), ticket.chat, number)
        segment.messages = (*ticket.chat.messages, *read_messages([message], "the reply"))
        self.earlier[number] = segment.messages
        drawn = zip(ids, response.logp[begun:], strict=True)
        return ChatReply(
            number=number,
            message=message,
            cut_off=completion.finish_reason == "length",
            prompt_tokens=len(segment.prompt_ids) + begun,
            reply_tokens=len(ids),
            tokens=[(decode([token]), logp) for token, logp in drawn] if ticket.chat.logprobs else None,
        )

    def abandon(self, ticket: Ticket) -> None:
        """Give up a reply that nobody waits for: the segment stays as it was before, and the reply does not count."""
        self.waited += time.monotonic() - ticket.began
        self._replies -= 1
        segment = ticket.segment
        segment.busy, segment.key = False, self._new_key()
        if not segment.turns:
            self._segments.remove(segment)

    def close(self, *, reward: float | None, error: str | None, seconds: float) -> list[Played]:
        """End the episode and return its responses to train on.

        Args:
            reward: of the episode; None: the episode is scored later.
            error: why the episode failed; None: it did not.
            seconds: duration of the episode, of which the policy took `waited`.
        """
        self.closed = True
        segments = [segment for segment in self._segments if segment.turns]
        if not segments:
            episode = Episode(turns=0, seconds=seconds, error=error or "agent: asked for no response")
            return [Played(episode=episode)]
        return [
            Played(
                prompt_ids=segment.prompt_ids,
                response=segment.response,
                finish_reason="length" if self._is_limited(segment, segments[-1]) else "stop",
                reward=None if error else reward,
                episode=Episode(
                    turns=segment.turns,
                    seconds=max(0.0, seconds - self.waited) if segment is segments[-1] else 0.0,
                    limited=self._is_limited(segment, segments[-1]),
                    error=error,
                ),
            )
            for segment in segments
        ]

    def _is_limited(self, segment: Segment, last: Segment) -> bool:
        return segment.at_limit or (self._limited and segment is last)

    @property
    def keys(self) -> list[int]:
        """List the keys of the segments."""
        return [segment.key for segment in self._segments]

    def _begin(self, chat: ChatRequest) -> Segment:
        ids = tuple(self._speech.conversation(chat.messages, tools=chat.tools))
        if len(ids) > self._max_prompt_length:
            text = f"the messages have {len(ids)} tokens, more than data.max_prompt_length = {self._max_prompt_length}"
            if not self.earlier:
                raise Refused(text, param="messages", code=_TOO_LONG)
            raise self._limit(text)  # the policy has spoken: its replies, or the answers to them, have grown
        seed = seed_of(self._rollout.seed, self._begun)
        self._begun += 1
        self._segments.append(Segment(key=self._new_key(), seed=seed, tools=_json(chat.tools), prompt_ids=ids))
        return self._segments[-1]

    def _limit(self, text: str, code: str = _TOO_LONG) -> Refused:
        self._limited = self.at_limit = True
        return Refused(f"{text}; the episode is scored as it is", param="messages", code=code)

    def _check_open(self) -> None:
        if self.closed:
            raise Refused("the episode is over", status=410)


def _json(tools: Sequence[Message]) -> str:
    return json.dumps(tools, sort_keys=True)

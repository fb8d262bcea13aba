"""Continuous batching: which request sits in which slot. Pure Python; the engine carries out what is planned here.

Every decision follows from the requests and the tokens drawn so far, which are the same on all ranks of a replica,
so the ranks stay in step without talking about it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.rollout.stop_strings import Decode, StopStrings
from megarl.types import Completion, SamplingParams


@dataclass(kw_only=True)
class Running:
    """A request in a slot: its prompt and the response so far.

    The newest token is not yet in the KV cache: the next decode step writes it, at `position`, and draws its successor.
    """

    request: int
    prompt: Sequence[int]
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logp: array[float] = field(default_factory=lambda: array("f"))
    model_logp: array[float] = field(default_factory=lambda: array("f"))

    @property
    def newest(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.token_ids) - 1


@dataclass(frozen=True, kw_only=True)
class SlotCopies:
    """Copy the first `length` positions of `sources[i]` to `targets[i]`; no slot is in both."""

    sources: Sequence[int]
    targets: Sequence[int]
    length: int


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Requests that enter. First compute the prompts into the slots from `first_slot` on, then copy.

    Attributes:
        prompts: what to put into the cache: each prompt without its last token, with which decoding starts.
        copies: for the requests whose prompt another slot has already.
    """

    first_slot: int
    prompts: Sequence[Sequence[int]]
    copies: SlotCopies


class Scheduler:
    """Keeps the first `len(running)` slots occupied without a gap; slot i holds `running[i]`.

    Args:
        max_num_seqs: slots.
        max_num_batched_tokens: tokens, padding included, of the prompts computed together; one prompt may be longer.
        decode: token ids to text, for `params.stop`.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode: Decode,
    ) -> None:
        self.running: list[Running] = []
        self._params, self._stop_token_ids = params, frozenset(params.stop_token_ids)
        self._stop_strings = StopStrings(params.stop, decode)
        self._prompts = prompts
        first_with: dict[tuple[int, ...], int] = {}
        self._same_prompt = [first_with.setdefault(tuple(p), i) for i, p in enumerate(prompts)]
        self._waiting = deque(range(len(prompts)))
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._completions: dict[int, Completion] = {}

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def completions(self) -> list[Completion]:
        """In the order of the requests, once nothing is busy."""
        return [self._completions[i] for i in range(len(self._prompts))]

    def admit(self) -> Admission:
        """Move waiting requests into the free slots, in order, as far as `max_num_batched_tokens` allows."""
        first_slot = len(self.running)
        slot_with = {self._same_prompt[r.request]: slot for slot, r in enumerate(self.running)}
        computed: list[int] = []
        copied: list[int] = []
        longest = 0
        while self._waiting and first_slot + len(computed) + len(copied) < self._max_num_seqs:
            request = self._waiting[0]
            if self._same_prompt[request] in slot_with:
                copied.append(request)
            else:
                longest = max(longest, len(self._prompts[request]) - 1)
                if computed and longest * (len(computed) + 1) > self._max_num_batched_tokens:
                    break
                slot_with[self._same_prompt[request]] = first_slot + len(computed)
                computed.append(request)
            self._waiting.popleft()
        self.running += [Running(request=i, prompt=self._prompts[i]) for i in (*computed, *copied)]
        first_copy = first_slot + len(computed)
        return Admission(
            first_slot=first_slot,
            prompts=[self._prompts[i][:-1] for i in computed],
            copies=SlotCopies(
                sources=[slot_with[self._same_prompt[i]] for i in copied],
                targets=range(first_copy, first_copy + len(copied)),
                length=max((len(self._prompts[i]) - 1 for i in copied), default=0),
            ),
        )

    def advance(self, drawn: Sequence[tuple[int, float, float]]) -> SlotCopies:
        """Append (token, logp, model_logp) to each running sequence; finished ones leave, the last fill their slots."""
        finished = [self._append(r, *row) for r, row in zip(self.running, drawn, strict=True)]
        left = len(finished) - sum(finished)
        holes = [slot for slot in range(left) if finished[slot]]
        movers = [slot for slot in range(left, len(finished)) if not finished[slot]]
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[left:]
        length = max((self.running[hole].position for hole in holes), default=0)
        return SlotCopies(sources=movers, targets=holes, length=length)

    def _append(self, running: Running, token: int, logp: float, model_logp: float) -> bool:
        """Whether that finished the response."""
        running.token_ids.append(token)
        running.logp.append(logp)
        running.model_logp.append(model_logp)
        stopped = token in self._stop_token_ids or self._stop_strings.found(running.token_ids) is not None
        if not stopped and len(running.token_ids) < self._params.max_tokens:
            return False
        self._completions[running.request] = Completion(
            token_ids=running.token_ids,
            logp=running.logp,
            model_logp=running.model_logp,
            finish_reason="stop" if stopped else "length",
        )
        return True

"""Batches requests continuously: decides which run, and which blocks of the KV cache they hold. On the host alone.

A decode step begins before the host knows what the one before has drawn. A sequence that this finishes is in one more
step, whose token nobody takes. Until then it keeps its blocks.

Every decision follows from the requests, the size of the cache and the tokens drawn so far, which are the same on all
ranks of a replica, so the ranks stay in step without talking about it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.engine import Request
from megarl.rollout.native.blocks import BlockPool
from megarl.rollout.native.slots import BLOCK, DRAWN, SLOT, Ints, Rows, Slots
from megarl.rollout.stop_strings import Decode, StopStrings
from megarl.types import Completion, FinishReason, RoutedExperts, SamplingParams

T = TypeVar("T", bound=Hashable)


class StopRules:
    """Holds what finishes a response that is sampled with some parameters, but for its length."""

    def __init__(self, params: SamplingParams, decode: Decode) -> None:
        self.token_ids = tuple(sorted(set(params.stop_token_ids)))
        self.strings = StopStrings(params.stop, decode) if params.stop else None


class _Numbered(Generic[T]):
    """Numbers values in the order in which they come."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


@dataclass(kw_only=True)
class Running:
    """Holds a request: its prompt, the response so far and, while it runs, its place in the KV cache.

    The newest token is not yet in the KV cache: the next decode step writes it, at `position`, and draws its successor.
    While the request runs, decode steps may be further than that, see `Slots`.

    Attributes:
        prompt_number: requests with equal prompts have the same.
        slot: row of the block table; kept as long as the request runs.
        blocks: of the KV cache, in the order of the tokens.
        block_tokens: number of tokens in those blocks, of a request that waits.
        routed: experts of its first tokens that were recorded, see `Tokens.routed`.
    """

    request: Request
    rules: StopRules
    prompt_number: int
    token_ids: array[int]
    logp: array[float]
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    block_tokens: int = 0
    routed: RoutedExperts | None = None

    @property
    def newest(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt[-1]

    @property
    def position(self) -> int:
        return len(self.request.prompt) + len(self.token_ids) - 1

    @property
    def cached(self) -> list[int]:
        """List the tokens that decoding expects in the KV cache: all but the newest."""
        return [*self.request.prompt, *self.token_ids][:-1]

    def completion(self, finish_reason: FinishReason | None) -> Completion:
        start = self.request.response
        response = start.drawn(self.token_ids[len(start) :], self.logp[len(start) :])
        return Completion(response=replace(response, routed=self.routed), finish_reason=finish_reason)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Says to copy block, or slot, `sources[i]` to `targets[i]`; none is in both."""

    sources: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Lists requests that enter: record their blocks, compute the tokens of some, then copy blocks for the others.

    Attributes:
        entered: all requests that enter.
        computed: requests whose `cached` tokens are not in the cache.
        extended: requests whose first `block_tokens` tokens are in the cache, from an earlier turn.
        copies: of the prompt's last block, where it is not full, for the others: each goes on writing in a copy.
        state_copies: of the slot in which the prompt was computed, for each of the others, of a recurrent model.
    """

    entered: Sequence[Running]
    computed: Sequence[Running]
    extended: Sequence[Running]
    copies: Copies
    state_copies: Copies


class Scheduler:
    """Keeps requests. When the blocks run out, the last to enter starts again later.

    Args:
        max_num_seqs: requests that run together.
        max_num_batched_tokens: prompt tokens computed together; one prompt may have more.
        blocks: of the KV cache, the scratch block included; enough for the longest request alone.
        decode: token ids to text, for stop strings.
        recurrent: whether layers keep a state per slot, which goes on with the sequence's newest token alone. Such a
            sequence is no source for others once it has drawn a token, and nothing of it is kept for another turn.
        leaving: called with each request that stops to run, while it has its blocks.

    Attributes:
        running: requests, in the order of entry.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        blocks: int,
        decode: Decode,
        recurrent: bool = False,
        leaving: Callable[[Running], None] = lambda r: None,
    ) -> None:
        self.running: list[Running] = []
        self._kinds = _Numbered[SamplingParams]()
        self._waiting: deque[Running] = deque()
        self._kept: dict[int, Running] = {}
        # weak: an agent may ask each time for another number of tokens
        self._rules: WeakValueDictionary[SamplingParams, StopRules] = WeakValueDictionary()
        self._prompts: dict[tuple[int, ...], int] = {}
        self._stop_ids = _Numbered[tuple[int, ...]]()
        self._pool, self._slots = BlockPool(blocks), Slots(max_num_seqs)
        self._in_slot: list[Running | None] = [None] * max_num_seqs
        self._order: Ints = np.empty(0, dtype=np.int64)
        self._max_num_batched_tokens, self._decode = max_num_batched_tokens, decode
        self._recurrent, self._leaving = recurrent, leaving

    @property
    def kinds(self) -> Sequence[SamplingParams]:
        """List the parameters of which each set draws tokens in another way, by the numbers in `Rows.kinds`."""
        return self._kinds.values

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Append requests to those that wait."""
        for request in requests:
            candidate = Running(
                request=request,
                rules=self._rules.setdefault(request.params, StopRules(request.params, self._decode)),
                prompt_number=self._prompts.setdefault(tuple(request.prompt), len(self._prompts)),
                token_ids=array("i", request.response.ids),
                logp=array("f", request.response.logp),
                routed=request.response.routed,
            )
            if earlier := self._kept.pop(request.key, None):
                self._take_over(candidate, earlier)
            self._waiting.append(candidate)

    def admit(self) -> Admission:
        """Give every running request the block its next token needs, then let waiting ones enter, in order."""
        self._grow()
        may_enter = self._waiting and self._slots.free
        holders = {r.prompt_number: r for r in self.running} if may_enter and not self._recurrent else {}
        entered: list[Running] = []
        computed: list[Running] = []
        extended: list[Running] = []
        sources: list[int] = []
        targets: list[int] = []
        holders_slots: list[int] = []
        sharers_slots: list[int] = []
        tokens = 0
        while self._waiting and self._slots.free:
            candidate = self._waiting[0]
            # A request with a response shares nothing: it computes its prompt again, or goes on in its own blocks.
            holder = None if candidate.token_ids else holders.get(candidate.prompt_number)
            shared = holder.blocks[: candidate.position // BLOCK_SIZE] if holder else candidate.blocks
            needed = blocks_for(candidate.position + 1) - len(shared)
            # Keep a block in reserve for each running request: the new one would otherwise soon have to leave again.
            if not self._free_up(needed + len(self.running), spared=candidate) and self.running:
                break
            if not holder:
                tokens += candidate.position - candidate.block_tokens
                if (computed or extended) and tokens > self._max_num_batched_tokens:
                    break
                (extended if candidate.block_tokens else computed).append(candidate)
                if not (self._recurrent and candidate.token_ids):
                    holders.setdefault(candidate.prompt_number, candidate)
            self._waiting.popleft()
            if holder:
                self._pool.share(shared)
            self._enter(candidate, shared + self._pool.take(needed))
            if holder and candidate.position % BLOCK_SIZE:
                sources.append(holder.blocks[len(shared)])
                targets.append(candidate.blocks[len(shared)])
            if holder and self._recurrent:
                holders_slots.append(holder.slot)
                sharers_slots.append(candidate.slot)
            entered.append(candidate)
            self.running.append(candidate)
        if entered:
            self._reorder()
        return Admission(
            entered=entered,
            computed=computed,
            extended=extended,
            copies=Copies(sources=sources, targets=targets),
            state_copies=Copies(sources=holders_slots, targets=sharers_slots),
        )

    def next_rows(self) -> Rows:
        """List the rows of the next decode step, one for each running request that may have another token; after
        `admit`."""
        return self._slots.next_rows(self._slots.unfinished(self._order))

    def advance(self, rows: Rows, ids: NDArray[np.int32], logp: NDArray[np.float32]) -> dict[int, Completion]:
        """Append the tokens that a decode step has drawn; returns the requests that this finishes, by key."""
        there = self._slots.still_there(rows)
        slots, count = rows.table[there, SLOT], rows.table[there, DRAWN] + 1
        for slot in self._slots.append(slots, ids[there], logp[there]):
            self._take_new(self._holder(slot))
        stopped = self._stopped(slots, ids[there])
        finished: dict[int, Completion] = {}
        for place in np.flatnonzero(stopped | (count == self._slots.most[slots])):
            r = self._holder(slots[place])
            self._leave(r, keep=r.request.keep and not self._recurrent)
            finished[r.request.key] = r.completion("stop" if stopped[place] else "length")
        if finished:
            self.running = [r for r in self.running if r.slot >= 0]
            self._reorder()
        return finished

    def under_way(self) -> dict[int, array[int]]:
        """Return the responses so far of the running requests, by key."""
        for r in self.running:
            self._take_new(r)
        return {r.request.key: r.token_ids for r in self.running}

    def interrupt(self) -> dict[int, Completion]:
        """Drop all requests; returns their responses so far, by key."""
        requests = [*self.running, *self._waiting]
        for r in requests:
            self._leave(r)
        self.running = []
        self._waiting.clear()
        self._reorder()
        return {r.request.key: r.completion(None) for r in requests}

    def forget(self, keys: Iterable[int]) -> None:
        """Free the blocks that are kept of these requests."""
        for key in keys:
            if earlier := self._kept.pop(key, None):
                self._leave(earlier)

    def _take_over(self, candidate: Running, earlier: Running) -> None:
        """Take the blocks of an earlier turn, if the response begins with that turn's."""
        same_prompt = candidate.prompt_number == earlier.prompt_number
        if same_prompt and candidate.token_ids[: len(earlier.token_ids)] == earlier.token_ids:
            candidate.blocks, candidate.block_tokens = earlier.blocks, earlier.position
        else:
            self._leave(earlier)

    def _grow(self) -> None:
        left = False
        for r in [self._holder(slot) for slot in self._slots.full(self._slots.unfinished(self._order))]:
            # A request that had to leave below has no slot, and needs no block.
            while r.slot >= 0 and self._slots.full(np.array([r.slot])).size:
                if self._free_up(1):
                    self._give(r, self._pool.take(1))
                else:
                    self._waiting.appendleft(youngest := self._youngest())
                    self._leave(youngest)
                    left = True
        if left:
            self._reorder()

    def _youngest(self) -> Running:
        """Take the last to enter of those whose last token is not being drawn: the others leave soon."""
        unfinished = set(self._slots.unfinished(self._order).tolist())
        return self.running.pop(max(i for i, r in enumerate(self.running) if r.slot in unfinished))

    def _enter(self, r: Running, blocks: list[int]) -> None:
        """Give a request a slot and blocks."""
        params, slots = r.request.params, self._slots
        slot = r.slot = slots.take()
        self._in_slot[slot] = r
        kind = replace(params, max_tokens=1, stop_token_ids=(), stop=(), routed_experts=False)
        r.blocks = []
        slots.rows[slot] = (r.newest, r.position, slot, 0, r.request.seed, len(r.token_ids))
        slots.most[slot], slots.kind[slot] = params.max_tokens, self._kinds.number(kind)
        slots.stop_ids[slot] = self._stop_ids.number(r.rules.token_ids)
        slots.has_stop_strings[slot] = r.rules.strings is not None
        self._give(r, blocks)

    def _give(self, r: Running, blocks: list[int]) -> None:
        r.blocks += blocks
        self._slots.rows[r.slot, BLOCK], self._slots.room[r.slot] = r.blocks[-1], len(r.blocks) * BLOCK_SIZE

    def _holder(self, slot: int) -> Running:
        r = self._in_slot[slot]
        assert r is not None
        return r

    def _reorder(self) -> None:
        """Note the slots of the running requests; after each change of these."""
        self._order = np.array([r.slot for r in self.running], dtype=np.int64)

    def _stopped(self, slots: Ints, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Tell which sequences end with these, their newest tokens."""
        stopped, sets = np.zeros(len(ids), dtype=bool), self._slots.stop_ids[slots]
        for number in np.unique(sets):
            stopped |= (sets == number) & np.isin(ids, self._stop_ids.values[number])
        for place in np.flatnonzero(self._slots.has_stop_strings[slots] & ~stopped):
            r = self._holder(slots[place])
            self._take_new(r)
            assert r.rules.strings is not None
            stopped[place] = r.rules.strings.found(r.token_ids, r.request.turn_start) is not None
        return stopped

    def _take_new(self, r: Running) -> None:
        """Append the tokens that were noted in the request's slot to its response."""
        ids, logp = self._slots.pop(r.slot)
        r.token_ids += ids
        r.logp += logp

    def _free_up(self, blocks: int, spared: Running | None = None) -> bool:
        """Free blocks that are held for turns to come, the oldest first; returns whether `blocks` are free."""
        while self._pool.free < blocks:
            if self._kept:
                self._leave(self._kept.pop(next(iter(self._kept))))
            elif holder := next((r for r in reversed(self._waiting) if r.blocks and r is not spared), None):
                self._leave(holder)
            else:
                return False
        return True

    def _leave(self, r: Running, *, keep: bool = False) -> None:
        """Give back a request's slot and, unless they are kept for another turn, its blocks."""
        if r.slot >= 0:
            self._take_new(r)
            self._leaving(r)
            self._slots.give_back(r.slot)
            self._in_slot[r.slot] = None
            r.slot = -1
        if keep:
            self._kept[r.request.key] = r
        else:
            self._pool.give_back(r.blocks)
            r.blocks, r.block_tokens = [], 0

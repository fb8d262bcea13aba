"""Batches requests continuously: decides which run, and which blocks of the KV cache they hold. Pure Python.

Every decision follows from the requests, the size of the cache and the tokens drawn so far, which are the same on all
ranks of a replica, so the ranks stay in step without talking about it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.engine import Request
from megarl.rollout.native.blocks import BlockPool
from megarl.rollout.stop_strings import Decode, StopStrings
from megarl.types import Completion, FinishReason, RoutedExperts, SamplingParams


class StopRules:
    """Decides when a response that is sampled with some parameters is finished.

    Attributes:
        kind: the parameters by which its tokens are drawn.
    """

    def __init__(self, params: SamplingParams, decode: Decode) -> None:
        self.kind = (params.temperature, params.top_p, params.top_k)
        self.max_tokens, self._stop_token_ids = params.max_tokens, frozenset(params.stop_token_ids)
        self._stop_strings = StopStrings(params.stop, decode)

    def ending(self, token_ids: Sequence[int], since: int) -> FinishReason | None:
        """Return how the newest token finishes the response, or None. Stop strings count from place `since` on."""
        if token_ids[-1] in self._stop_token_ids or self._stop_strings.found(token_ids, since) is not None:
            return "stop"
        return None if len(token_ids) < self.max_tokens else "length"


@dataclass(kw_only=True)
class Running:
    """Holds a request: its prompt, the response so far and, while it runs, its place in the KV cache.

    The newest token is not yet in the KV cache: the next decode step writes it, at `position`, and draws its successor.

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
    """Keeps requests, `running` in the order of entry. When the blocks run out, the last to enter starts again later.

    Args:
        max_num_seqs: requests that run together.
        max_num_batched_tokens: prompt tokens computed together; one prompt may be longer.
        blocks: of the KV cache, the scratch block included; enough for the longest request alone.
        decode: token ids to text, for stop strings.
        recurrent: whether layers keep a state per slot, which goes on with the sequence's newest token alone. Such a
            sequence is no source for others once it has drawn a token, and nothing of it is kept for another turn.
        leaving: called with each request that stops to run, while it has its blocks.
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
        self._waiting: deque[Running] = deque()
        self._kept: dict[int, Running] = {}
        # weak: an agent may ask each time for another number of tokens
        self._rules: WeakValueDictionary[SamplingParams, StopRules] = WeakValueDictionary()
        self._prompts: dict[tuple[int, ...], int] = {}
        self._pool = BlockPool(blocks)
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_batched_tokens, self._decode = max_num_batched_tokens, decode
        self._recurrent, self._leaving = recurrent, leaving

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def one_kind(self) -> bool:
        """Return whether the tokens of all running requests are drawn alike."""
        return len({r.rules.kind for r in self.running}) == 1

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
        holders = {r.prompt_number: r for r in self.running} if self._waiting and not self._recurrent else {}
        entered: list[Running] = []
        computed: list[Running] = []
        extended: list[Running] = []
        sources: list[int] = []
        targets: list[int] = []
        holders_slots: list[int] = []
        sharers_slots: list[int] = []
        tokens = 0
        while self._waiting and self._slots:
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
            candidate.slot, candidate.blocks = self._slots.pop(), shared + self._pool.take(needed)
            if holder and candidate.position % BLOCK_SIZE:
                sources.append(holder.blocks[len(shared)])
                targets.append(candidate.blocks[len(shared)])
            if holder and self._recurrent:
                holders_slots.append(holder.slot)
                sharers_slots.append(candidate.slot)
            entered.append(candidate)
            self.running.append(candidate)
        return Admission(
            entered=entered,
            computed=computed,
            extended=extended,
            copies=Copies(sources=sources, targets=targets),
            state_copies=Copies(sources=holders_slots, targets=sharers_slots),
        )

    def advance(self, drawn: Sequence[tuple[int, float]]) -> dict[int, Completion]:
        """Append (token, logp) to each running request; returns the requests that this finishes, by key."""
        finished: dict[int, Completion] = {}
        for r, (token, logp) in zip(self.running, drawn, strict=True):
            r.token_ids.append(token)
            r.logp.append(logp)
            if reason := r.rules.ending(r.token_ids, r.request.turn_start):
                self._leave(r, keep=r.request.keep and not self._recurrent)
                finished[r.request.key] = r.completion(reason)
        if finished:
            self.running = [r for r in self.running if r.slot >= 0]
        return finished

    def interrupt(self) -> dict[int, Completion]:
        """Drop all requests; returns their responses so far, by key."""
        requests = [*self.running, *self._waiting]
        for r in requests:
            self._leave(r)
        self.running = []
        self._waiting.clear()
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
        for r in tuple(self.running):
            # A request that had to leave below has no slot, and needs no block.
            while r.slot >= 0 and r.position == len(r.blocks) * BLOCK_SIZE:
                if self._free_up(1):
                    r.blocks += self._pool.take(1)
                else:
                    self._waiting.appendleft(youngest := self.running.pop())
                    self._leave(youngest)

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
            self._leaving(r)
            self._slots.append(r.slot)
            r.slot = -1
        if keep:
            self._kept[r.request.key] = r
        else:
            self._pool.give_back(r.blocks)
            r.blocks, r.block_tokens = [], 0

"""Continuous batching: which requests run, and which blocks of the KV cache they hold. Pure Python.

Every decision follows from the requests, the size of the cache and the tokens drawn so far, which are the same on all
ranks of a replica, so the ranks stay in step without talking about it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.engine import Request
from megarl.rollout.native.blocks import BlockPool
from megarl.rollout.stop_strings import Decode, StopStrings
from megarl.types import Completion, FinishReason, SamplingParams


class Rules:
    """When a response that is sampled with some parameters is finished.

    Attributes:
        kind: how its tokens are drawn.
    """

    def __init__(self, params: SamplingParams, decode: Decode) -> None:
        self.kind = (params.temperature, params.top_p, params.top_k)
        self.max_tokens, self._stop_token_ids = params.max_tokens, frozenset(params.stop_token_ids)
        self._stop_strings = StopStrings(params.stop, decode)

    def ending(self, token_ids: Sequence[int], since: int) -> FinishReason | None:
        """Return how the newest token finishes the response; None if it does not. Stop strings count from a place
        on."""
        if token_ids[-1] in self._stop_token_ids or self._stop_strings.found(token_ids, since) is not None:
            return "stop"
        return None if len(token_ids) < self.max_tokens else "length"


@dataclass(kw_only=True)
class Running:
    """A request: its prompt, the response so far and, while it runs, its place in the KV cache.

    The newest token is not yet in the KV cache: the next decode step writes it, at `position`, and draws its successor.

    Attributes:
        same_prompt: number of the prompt; requests with equal prompts have the same.
        slot: row of the block table; kept as long as the request runs.
        blocks: of the KV cache, in the order of the tokens.
        held: tokens that are in those blocks, of a request that waits.
    """

    request: Request
    rules: Rules
    same_prompt: int
    token_ids: array[int]
    logp: array[float]
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    held: int = 0

    @property
    def newest(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt[-1]

    @property
    def position(self) -> int:
        return len(self.request.prompt) + len(self.token_ids) - 1

    @property
    def cached(self) -> list[int]:
        """The tokens that decoding wants to find in the KV cache: all but the newest."""
        return [*self.request.prompt, *self.token_ids][:-1]

    def completion(self, finish_reason: FinishReason | None) -> Completion:
        begun = self.request.response
        drawn = begun.drawn(self.token_ids[len(begun) :], self.logp[len(begun) :])
        return Completion(response=drawn, finish_reason=finish_reason)


@dataclass(frozen=True, kw_only=True)
class BlockCopies:
    """Copy block `sources[i]` to block `targets[i]`; no block is in both."""

    sources: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Requests that enter: write down their blocks, compute the tokens of some, then copy for the others.

    Attributes:
        entered: all of them.
        computed: those whose `cached` tokens nobody has in the cache.
        extended: those that have the first `held` of these tokens there, from an earlier turn.
        copies: for the others, the prompt's last block, where it is not full: each goes on writing in a copy.
    """

    entered: Sequence[Running]
    computed: Sequence[Running]
    extended: Sequence[Running]
    copies: BlockCopies


class Scheduler:
    """`running` is in the order of entry. When the blocks run out, the last to enter leaves and starts again later.

    Args:
        max_num_seqs: requests that run together.
        max_num_batched_tokens: prompt tokens computed together; one prompt may be longer.
        blocks: of the KV cache, the scratch block included; enough for the longest request alone.
        decode: token ids to text, for stop strings.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, blocks: int, decode: Decode) -> None:
        self.running: list[Running] = []
        self._waiting: deque[Running] = deque()
        self._kept: dict[int, Running] = {}
        # as long as a request has them: an agent may ask each time for another number of tokens
        self._rules: WeakValueDictionary[SamplingParams, Rules] = WeakValueDictionary()
        self._prompts: dict[tuple[int, ...], int] = {}
        self._pool = BlockPool(blocks)
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_batched_tokens, self._decode = max_num_batched_tokens, decode

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def one_kind(self) -> bool:
        """Whether the tokens of all requests that run are drawn alike."""
        return len({r.rules.kind for r in self.running}) == 1

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests wait behind those that wait already."""
        for request in requests:
            entering = Running(
                request=request,
                rules=self._rules.setdefault(request.params, Rules(request.params, self._decode)),
                same_prompt=self._prompts.setdefault(tuple(request.prompt), len(self._prompts)),
                token_ids=array("i", request.response.ids),
                logp=array("f", request.response.logp),
            )
            if earlier := self._kept.pop(request.key, None):
                self._take_over(entering, earlier)
            self._waiting.append(entering)

    def admit(self) -> Admission:
        """Give every running request the block its next token needs, then let waiting ones enter, in order."""
        self._grow()
        with_prompt = {r.same_prompt: r for r in self.running} if self._waiting else {}
        entered: list[Running] = []
        computed: list[Running] = []
        extended: list[Running] = []
        sources: list[int] = []
        targets: list[int] = []
        tokens = 0
        while self._waiting and self._slots:
            entering = self._waiting[0]
            # A request with a response shares nothing: it computes its prompt again, or goes on in its own blocks.
            holder = None if entering.token_ids else with_prompt.get(entering.same_prompt)
            shared = holder.blocks[: entering.position // BLOCK_SIZE] if holder else entering.blocks
            needed = blocks_for(entering.position + 1) - len(shared)
            # A block in reserve for each that runs: whoever enters would otherwise soon be cut short again.
            if not self._free_up(needed + len(self.running), spared=entering) and self.running:
                break
            if not holder:
                tokens += entering.position - entering.held
                if (computed or extended) and tokens > self._max_num_batched_tokens:
                    break
                (extended if entering.held else computed).append(entering)
                with_prompt.setdefault(entering.same_prompt, entering)
            self._waiting.popleft()
            if holder:
                self._pool.share(shared)
            entering.slot, entering.blocks = self._slots.pop(), shared + self._pool.take(needed)
            if holder and entering.position % BLOCK_SIZE:
                sources.append(holder.blocks[len(shared)])
                targets.append(entering.blocks[len(shared)])
            entered.append(entering)
            self.running.append(entering)
        copies = BlockCopies(sources=sources, targets=targets)
        return Admission(entered=entered, computed=computed, extended=extended, copies=copies)

    def advance(self, drawn: Sequence[tuple[int, float]]) -> dict[int, Completion]:
        """Append (token, logp) to each running request; those that this finishes leave, and are returned by key."""
        finished: dict[int, Completion] = {}
        for r, (token, logp) in zip(self.running, drawn, strict=True):
            r.token_ids.append(token)
            r.logp.append(logp)
            if reason := r.rules.ending(r.token_ids, r.request.turn_start):
                finished[r.request.key] = r.completion(reason)
                self._leave(r, keep=r.request.keep)
        if finished:
            self.running = [r for r in self.running if r.slot >= 0]
        return finished

    def interrupt(self) -> dict[int, Completion]:
        """Drop all requests; returns what there is of their responses, by key."""
        everyone = [*self.running, *self._waiting]
        for r in everyone:
            self._leave(r)
        self.running = []
        self._waiting.clear()
        return {r.request.key: r.completion(None) for r in everyone}

    def forget(self, keys: Iterable[int]) -> None:
        """Free what is kept of these requests."""
        for key in keys:
            if earlier := self._kept.pop(key, None):
                self._leave(earlier)

    def _take_over(self, entering: Running, earlier: Running) -> None:
        """Go on in the blocks of an earlier turn, if the response begins with what was said in it."""
        same = entering.same_prompt == earlier.same_prompt
        if same and entering.token_ids[: len(earlier.token_ids)] == earlier.token_ids:
            entering.blocks, entering.held = earlier.blocks, earlier.position
        else:
            self._leave(earlier)

    def _grow(self) -> None:
        for r in tuple(self.running):
            # Whoever was cut short below has no slot, and is no longer asked.
            while r.slot >= 0 and r.position == len(r.blocks) * BLOCK_SIZE:
                if self._free_up(1):
                    r.blocks += self._pool.take(1)
                else:
                    self._waiting.appendleft(youngest := self.running.pop())
                    self._leave(youngest)

    def _free_up(self, blocks: int, spared: Running | None = None) -> bool:
        """Whether so many are free, at the cost of what is held for turns to come, the oldest first."""
        while self._pool.free < blocks:
            if self._kept:
                self._leave(self._kept.pop(next(iter(self._kept))))
            elif holding := next((r for r in reversed(self._waiting) if r.blocks and r is not spared), None):
                self._leave(holding)
            else:
                return False
        return True

    def _leave(self, leaving: Running, *, keep: bool = False) -> None:
        """Give back its slot and, unless they are kept for another turn, its blocks."""
        if leaving.slot >= 0:
            self._slots.append(leaving.slot)
            leaving.slot = -1
        if keep:
            self._kept[leaving.request.key] = leaving
        else:
            self._pool.give_back(leaving.blocks)
            leaving.blocks, leaving.held = [], 0

"""Continuous batching: which requests run, and which blocks of the KV cache they hold. Pure Python.

Every decision follows from the requests, the size of the cache and the tokens drawn so far, which are the same on all
ranks of a replica, so the ranks stay in step without talking about it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.native.blocks import BlockPool
from megarl.rollout.stop_strings import Decode, StopStrings
from megarl.types import Completion, SamplingParams


@dataclass(kw_only=True)
class Running:
    """A request: its prompt, the response so far and, while it runs, its place in the KV cache.

    The newest token is not yet in the KV cache: the next decode step writes it, at `position`, and draws its successor.

    Attributes:
        slot: row of the block table; kept as long as the request runs.
        blocks: of the KV cache, in the order of the tokens.
    """

    request: int
    prompt: Sequence[int]
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logp: array[float] = field(default_factory=lambda: array("f"))

    @property
    def newest(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.token_ids) - 1

    @property
    def cached(self) -> list[int]:
        """The tokens that decoding wants to find in the KV cache: all but the newest."""
        return [*self.prompt, *self.token_ids][:-1]


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
        copies: for the others, the prompt's last block, where it is not full: each goes on writing in a copy.
    """

    entered: Sequence[Running]
    computed: Sequence[Running]
    copies: BlockCopies


class Scheduler:
    """`running` is in the order of entry. When the blocks run out, the last to enter leaves and starts again later.

    Args:
        max_num_seqs: requests that run together.
        max_num_batched_tokens: prompt tokens computed together; one prompt may be longer.
        blocks: of the KV cache, the scratch block included; enough for the longest request alone.
        decode: token ids to text, for `params.stop`.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        blocks: int,
        decode: Decode,
    ) -> None:
        self.running: list[Running] = []
        self._params, self._stop_token_ids = params, frozenset(params.stop_token_ids)
        self._stop_strings = StopStrings(params.stop, decode)
        self._waiting = deque(Running(request=i, prompt=prompt) for i, prompt in enumerate(prompts))
        first_with: dict[tuple[int, ...], int] = {}
        self._same_prompt = [first_with.setdefault(tuple(p), i) for i, p in enumerate(prompts)]
        self._pool = BlockPool(blocks)
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_batched_tokens = max_num_batched_tokens
        self._completions: dict[int, Completion] = {}

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def completions(self) -> list[Completion]:
        """In the order of the requests, once nothing is busy."""
        return [self._completions[i] for i in range(len(self._same_prompt))]

    def admit(self) -> Admission:
        """Give every running request the block its next token needs, then let waiting ones enter, in order."""
        self._grow()
        with_prompt = {self._same_prompt[r.request]: r for r in self.running} if self._waiting else {}
        entered: list[Running] = []
        computed: list[Running] = []
        sources: list[int] = []
        targets: list[int] = []
        tokens = 0
        while self._waiting and self._slots:
            entering = self._waiting[0]
            # A request that was cut short computes its prompt again with its response, and shares nothing.
            holder = None if entering.token_ids else with_prompt.get(self._same_prompt[entering.request])
            shared = holder.blocks[: entering.position // BLOCK_SIZE] if holder else []
            needed = blocks_for(entering.position + 1) - len(shared)
            # A block in reserve for each that runs: whoever enters would otherwise soon be cut short again.
            if self.running and needed + len(self.running) > self._pool.free:
                break
            if not holder:
                tokens += entering.position
                if computed and tokens > self._max_num_batched_tokens:
                    break
                computed.append(entering)
                with_prompt.setdefault(self._same_prompt[entering.request], entering)
            self._waiting.popleft()
            self._pool.share(shared)
            entering.slot, entering.blocks = self._slots.pop(), shared + self._pool.take(needed)
            if holder and entering.position % BLOCK_SIZE:
                sources.append(holder.blocks[len(shared)])
                targets.append(entering.blocks[len(shared)])
            entered.append(entering)
            self.running.append(entering)
        return Admission(entered=entered, computed=computed, copies=BlockCopies(sources=sources, targets=targets))

    def advance(self, drawn: Sequence[tuple[int, float]]) -> None:
        """Append (token, logp) to each running request; finished ones leave."""
        finished = [r for r, row in zip(self.running, drawn, strict=True) if self._append(r, *row)]
        for r in finished:
            self._leave(r)
        if finished:
            self.running = [r for r in self.running if r.blocks]

    def _grow(self) -> None:
        for r in tuple(self.running):
            # Whoever was cut short below has no blocks, and is no longer asked.
            while r.blocks and r.position == len(r.blocks) * BLOCK_SIZE:
                if self._pool.free:
                    r.blocks += self._pool.take(1)
                else:
                    self._waiting.appendleft(youngest := self.running.pop())
                    self._leave(youngest)

    def _leave(self, running: Running) -> None:
        self._pool.give_back(running.blocks)
        self._slots.append(running.slot)
        running.slot, running.blocks = -1, []

    def _append(self, running: Running, token: int, logp: float) -> bool:
        """Whether that finished the response."""
        running.token_ids.append(token)
        running.logp.append(logp)
        stopped = token in self._stop_token_ids or self._stop_strings.found(running.token_ids) is not None
        if not stopped and len(running.token_ids) < self._params.max_tokens:
            return False
        self._completions[running.request] = Completion(
            token_ids=running.token_ids,
            logp=running.logp,
            finish_reason="stop" if stopped else "length",
        )
        return True

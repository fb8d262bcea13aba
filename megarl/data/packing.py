"""Plans which sequences go through the model together, on which data-parallel rank. Pure: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.data.balance import first_fit_decreasing, karmarkar_karp

LAUNCHED = 8192
"""Tokens that a GPU computes in the time in which a host launches a micro-batch's kernels, of which there are as many
for fewer tokens: 9,200 for Qwen2-1.5B's shape on one H200, and a fraction of it for larger models."""

MicroBatches = list[list[int]]
"""Sequence indices of each micro-batch, in the order in which they run."""

Plan = list[list[MicroBatches]]
"""plan[dp_rank][mini_batch]. All dp ranks have the same number of micro-batches in the same mini-batch; a micro-batch
is empty only where a rank has fewer sequences, or parts with a prompt in common, than micro-batches."""


@dataclass(frozen=True, kw_only=True)
class SharedPrompts:
    """Says which sequences begin with the same prompt, which a micro-batch that has several of them computes once.

    Attributes:
        numbers: one for each sequence's prompt, the same for equal prompts of equal length.
        tokens: of each sequence's prompt; 0: it shares none.
    """

    numbers: Sequence[int]
    tokens: Sequence[int]

    def in_order(self, sequences: Sequence[int]) -> list[int]:
        """Put sequences with the same prompt behind the first of them."""
        of_prompt: dict[tuple[int, int], list[int]] = {}
        for i in sequences:
            of_prompt.setdefault((self.numbers[i], self.tokens[i]), []).append(i)
        return [i for members in of_prompt.values() for i in members]

    def pieces(
        self, sequences: Sequence[int], lengths: Sequence[int], most: int, *, filling: bool = False
    ) -> MicroBatches:
        """Put sequences with the same prompt together, up to `most` tokens with the prompt counted once.

        Args:
            filling: cut them where the pieces, one after another, fill micro-batches of `most` tokens.
        """
        pieces: MicroBatches = []
        room = most
        for i in self.in_order(sequences):
            again = self._again(pieces[-1][-1], i) if pieces else 0
            more = lengths[i] - again
            if again == 0 or more > room:
                pieces.append([])
                more = lengths[i]
                if not filling or more > room:
                    room = most
            pieces[-1].append(i)
            room -= more
        return pieces

    def computed(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """Count the tokens of neighbours, each prompt once."""
        return sum(lengths[i] for i in sequences) - self.saved(sequences)[0]

    def saved(self, sequences: Sequence[int]) -> tuple[int, int]:
        """Count what a micro-batch of these sequences saves: tokens, and the sum of squares of prompts."""
        again = [self._again(before, i) for before, i in pairwise(sequences)]
        return sum(again), sum(n * n for n in again)

    def _again(self, before: int, sequence: int) -> int:
        """Count the tokens of a sequence's prompt that the sequence before it has too."""
        same = self.numbers[before] == self.numbers[sequence] and self.tokens[before] == self.tokens[sequence]
        return self.tokens[sequence] if same else 0


def pack_by_tokens(
    lengths: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    *,
    dp: int,
    max_tokens: int,
    multiple_of: int = 1,
    balance: bool = True,
    together: int = 1,
    prompts: SharedPrompts | None = None,
) -> Plan:
    """Plan micro-batches of at most `max_tokens` tokens, as few as the fullest dp rank needs, nearly equal in tokens.

    Args:
        lengths: tokens per sequence.
        mini_batches: the sequence indices of each optimizer step.
        dp: data-parallel ranks.
        max_tokens: tokens per micro-batch at most (ppo_max_token_len_per_gpu).
        multiple_of: round the number of micro-batches up to a multiple (interleaved pipelines need one of their size).
        balance: even out tokens over the dp ranks; false: equal counts of what goes together, in order.
        together: so many neighbours, from the first sequence on, share a micro-batch and stay neighbours in it: 2 for
            the pairs (0, 1), (2, 3) ... A mini-batch must hold them whole, in order.
        prompts: sequences with the same prompt become neighbours, as far as they have a micro-batch in common, and
            count with one prompt. With `together` they stay where they are.

    Raises:
        ValueError: a sequence, or such neighbours together, are longer than `max_tokens`.
    """
    units = _units(lengths, together)
    for i, length in enumerate(units):
        if length > max_tokens:
            who = f"sequence {i} has" if together == 1 else f"sequences {i * together} to {(i + 1) * together - 1} have"
            most = "data.max_prompt_length + data.max_response_length"
            raise ValueError(
                f"{who} {length} tokens, more than ppo_max_token_len_per_gpu = {max_tokens}: raise it to "
                f"{most if together == 1 else f'{together} x ({most})'}"
            )
    how: Any = dict(dp=dp, max_tokens=max_tokens, multiple_of=multiple_of, balance=balance)
    if prompts is not None and together == 1:
        return _pack_pieces(lengths, mini_batches, prompts, **how)
    plan = _plan_by_tokens(units, [_unit_indices(sequences, together) for sequences in mini_batches], **how)
    return _sequences_of(plan, together)


def _pack_pieces(
    lengths: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    prompts: SharedPrompts,
    *,
    dp: int,
    max_tokens: int,
    multiple_of: int,
    balance: bool,
) -> Plan:
    """Plan each mini-batch with prompts whole and cut, and take the plan whose fullest rank has the least to compute.

    A micro-batch counts with as many tokens as a GPU computes while a host launches its kernels, at least. With
    interleaved stages, which come with `multiple_of`, other ranks wait for the largest micro-batch as well.
    """
    least = min(LAUNCHED, max_tokens)
    how: Any = dict(dp=dp, max_tokens=max_tokens, multiple_of=multiple_of, balance=balance)

    def plan_of(pieces: MicroBatches) -> list[MicroBatches]:
        tokens = [prompts.computed(piece, lengths) for piece in pieces]
        plan = _plan_by_tokens(tokens, [range(len(pieces))], **how)
        members = [[[i for piece in micro for i in pieces[piece]] for micro in share] for (share,) in plan]
        return [[prompts.in_order(micro) for micro in share] for share in members]

    def cost(plan: list[MicroBatches]) -> int:
        loads = [[max(least, prompts.computed(micro, lengths)) for micro in share] for share in plan]
        return max(map(sum, loads)) + (multiple_of - 1) * max(map(max, loads))

    best = [
        min(map(plan_of, _ways_to_cut(lengths, sequences, prompts, dp, max_tokens)), key=cost)
        for sequences in mini_batches
    ]
    return [[plan[rank] for plan in best] for rank in range(dp)]


def _ways_to_cut(
    lengths: Sequence[int], sequences: Sequence[int], prompts: SharedPrompts, dp: int, max_tokens: int
) -> list[MicroBatches]:
    """List the pieces to try: as large as fits; to fill micro-batches; and smaller ones for ranks with few prompts."""
    whole = prompts.pieces(sequences, lengths, max_tokens)
    ways = [whole, prompts.pieces(sequences, lengths, max_tokens, filling=True)]
    share = prompts.computed(prompts.in_order(sequences), lengths) // dp
    if max(prompts.computed(piece, lengths) for piece in whole) > share // 4:
        smaller = sorted({most for most in (share, share // 2, share // 4, 0) if most < max_tokens}, reverse=True)
        ways += [prompts.pieces(sequences, lengths, most) for most in smaller]
    return ways


def _plan_by_tokens(
    tokens: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    *,
    dp: int,
    max_tokens: int,
    multiple_of: int,
    balance: bool,
) -> Plan:
    return _plan(
        tokens,
        mini_batches,
        dp=dp,
        multiple_of=multiple_of,
        balance=balance,
        fewest=lambda share: len(_fewest_bins(tokens, share, max_tokens)),
        fill=lambda share, count: _bins(tokens, share, count, max_tokens),
    )


def pack_by_count(
    lengths: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    *,
    dp: int,
    micro_batch_size: int,
    multiple_of: int = 1,
    balance: bool = True,
    together: int = 1,
) -> Plan:
    """Plan micro-batches of at most `micro_batch_size` sequences (ppo_micro_batch_size_per_gpu), cut in order, equally.

    The other arguments are those of `pack_by_tokens`.

    Raises:
        ValueError: `micro_batch_size` is less than `together`.
    """
    if micro_batch_size < together:
        raise ValueError(f"ppo_micro_batch_size_per_gpu = {micro_batch_size} is less than the {together} of a pair")
    plan = _plan(
        _units(lengths, together),
        [_unit_indices(sequences, together) for sequences in mini_batches],
        dp=dp,
        multiple_of=multiple_of,
        balance=balance,
        fewest=lambda share: -(-len(share) // (micro_batch_size // together)),
        fill=_slices,
    )
    return _sequences_of(plan, together)


def _units(lengths: Sequence[int], together: int) -> Sequence[int]:
    """Count the tokens of each run of `together` neighbours."""
    return [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]


def _unit_indices(sequences: Sequence[int], together: int) -> list[int]:
    return [i // together for i in sequences[::together]]


def _sequences_of(plan: Plan, together: int) -> Plan:
    """Turn a plan of runs of neighbours into one of their sequences: with 2 together [1, 4] becomes [2, 3, 8, 9]."""

    def expanded(units: Sequence[int]) -> list[int]:
        return [unit * together + k for unit in units for k in range(together)]

    return [[[expanded(micro) for micro in mini_batch] for mini_batch in rank] for rank in plan]


def _plan(
    lengths: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    *,
    dp: int,
    multiple_of: int,
    balance: bool,
    fewest: Callable[[Sequence[int]], int],
    fill: Callable[[Sequence[int], int], MicroBatches],
) -> Plan:
    plan: Plan = [[] for _ in range(dp)]
    for sequences in mini_batches:
        shares = karmarkar_karp(lengths, sequences, dp) if balance else _slices(sequences, dp)
        count = max(fewest(share) for share in shares)
        count = -(-count // multiple_of) * multiple_of
        for rank, share in enumerate(shares):
            plan[rank].append(fill(share, count))
    return plan


def _slices(sequences: Sequence[int], count: int) -> MicroBatches:
    """Cut `count` consecutive slices whose sizes differ by one at most."""
    cuts = [len(sequences) * k // count for k in range(count + 1)]
    return [list(sequences[start:end]) for start, end in pairwise(cuts)]


def _fits(lengths: Sequence[int], bins: MicroBatches, max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in part) <= max_tokens for part in bins)


def _fewest_bins(lengths: Sequence[int], share: Sequence[int], max_tokens: int) -> MicroBatches:
    """Fill as few bins as balanced differencing fits into, and no more than first-fit-decreasing needs."""
    fallback = first_fit_decreasing(lengths, share, max_tokens)
    lower_bound = -(-sum(lengths[i] for i in share) // max_tokens)
    for count in range(lower_bound, len(fallback)):
        bins = karmarkar_karp(lengths, share, count)
        if _fits(lengths, bins, max_tokens):
            return bins
    return fallback


def _bins(lengths: Sequence[int], share: Sequence[int], count: int, max_tokens: int) -> MicroBatches:
    """Fill `count` bins within the budget; `count` is at least what `_fewest_bins` needs."""
    bins = karmarkar_karp(lengths, share, count)
    if _fits(lengths, bins, max_tokens):
        return bins
    bins = _fewest_bins(lengths, share, max_tokens)
    while len(bins) < count:
        largest = max((part for part in bins if len(part) > 1), key=lambda part: sum(lengths[i] for i in part))
        bins.remove(largest)
        bins += karmarkar_karp(lengths, largest, 2)
    return bins

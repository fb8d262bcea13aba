"""Micro-batch plans: every sequence once, within the budget, the same number on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.balance import first_fit_decreasing, karmarkar_karp
from megarl.data.packing import Plan, pack_by_count, pack_by_tokens

MAX_TOKENS = 40


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths and mini-batches of them."""
    lengths = draw(st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=40))
    order = draw(st.permutations(range(len(lengths))))
    size = draw(st.integers(1, len(lengths)))
    return lengths, [order[i : i + size] for i in range(0, len(order), size)]


def check_plan(plan: Plan, mini_batches: list[list[int]], dp: int, multiple_of: int) -> None:
    assert len(plan) == dp
    for k, mini_batch in enumerate(mini_batches):
        ranks = [rank[k] for rank in plan]
        assert sorted(i for rank in ranks for micro in rank for i in micro) == sorted(mini_batch)
        counts = {len(rank) for rank in ranks}
        assert len(counts) == 1 and counts.pop() % multiple_of == 0
        for rank in ranks:
            sequences = sum(map(len, rank))
            assert sum(not micro for micro in rank) == max(0, len(rank) - sequences)  # empty only when unavoidable
        assert sum(not any(rank) for rank in ranks) == max(0, dp - len(mini_batch))


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_pack_by_tokens(batch: tuple[list[int], list[list[int]]], dp: int, multiple_of: int, balance: bool) -> None:
    lengths, mini_batches = batch
    plan = pack_by_tokens(lengths, mini_batches, dp=dp, max_tokens=MAX_TOKENS, multiple_of=multiple_of, balance=balance)
    check_plan(plan, mini_batches, dp, multiple_of)
    for rank in plan:
        for micro_batches in rank:
            assert all(sum(lengths[i] for i in micro) <= MAX_TOKENS for micro in micro_batches)
    again = pack_by_tokens(
        lengths, mini_batches, dp=dp, max_tokens=MAX_TOKENS, multiple_of=multiple_of, balance=balance
    )
    assert again == plan


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(1, 7))
def test_pack_by_count(
    batch: tuple[list[int], list[list[int]]], dp: int, multiple_of: int, balance: bool, size: int
) -> None:
    lengths, mini_batches = batch
    plan = pack_by_count(lengths, mini_batches, dp=dp, micro_batch_size=size, multiple_of=multiple_of, balance=balance)
    check_plan(plan, mini_batches, dp, multiple_of)
    assert all(len(micro) <= size for rank in plan for micro_batches in rank for micro in micro_batches)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 6))
def test_karmarkar_karp_is_close_to_even(lengths: list[int], parts: int) -> None:
    split = karmarkar_karp(lengths, range(len(lengths)), parts)
    sums = [sum(lengths[i] for i in part) for part in split]
    assert sorted(i for part in split for i in part) == list(range(len(lengths)))
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] <= max(lengths)  # merging never widens a spread


def test_karmarkar_karp_by_hand() -> None:
    # 8-7 leaves 1, 6-5 leaves 1, 4-1 leaves 3, 3-1 leaves 2; the optimum would leave 0
    lengths = [8, 7, 6, 5, 4]
    split = karmarkar_karp(lengths, range(5), 2)
    assert [sum(lengths[i] for i in part) for part in split] == [16, 14]


def test_first_fit_decreasing() -> None:
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], range(6), 10) == [[1, 4], [0, 2, 3, 5]]


def test_tokens_are_even_over_ranks() -> None:
    lengths = [100, 1, 1, 1, 99, 1, 1, 1]
    plan = pack_by_tokens(lengths, [range(8)], dp=2, max_tokens=128)
    assert [sum(lengths[i] for micro in rank[0] for i in micro) for rank in plan] == [103, 102]
    unbalanced = pack_by_tokens(lengths[:4] + [1] * 4, [range(8)], dp=2, max_tokens=128, balance=False)
    assert [sorted(i for micro in rank[0] for i in micro) for rank in unbalanced] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_micro_batches_are_even_and_few() -> None:
    lengths = [30] * 10  # 300 tokens: three bins of 128 would do by sum, but no bin holds more than four
    (rank,) = pack_by_tokens(lengths, [range(10)], dp=1, max_tokens=128)
    assert sorted(map(len, rank[0])) == [3, 3, 4]


def test_first_fit_rescues_what_differencing_overflows() -> None:
    lengths = [2, 4, 4, 5, 5]  # only {5, 5}, {4, 4, 2} fits into two bins of 10
    assert karmarkar_karp(lengths, range(5), 2) == [[0, 2, 4], [1, 3]]  # 11 and 9
    (rank,) = pack_by_tokens(lengths, [range(5)], dp=1, max_tokens=10)
    assert rank[0] == [[3, 4], [0, 1, 2]]


def test_a_bin_more_may_overflow_again() -> None:
    # 13 bins are needed; rounded up to 14, differencing puts 21 tokens into one of them
    lengths = [12, 9, 7, 8, 6, 18, 7, 6, 9, 7, 20, 20, 7, 9, 6, 12, 8, 7, 11, 16, 7, 17, 7, 10]
    assert max(sum(lengths[i] for i in part) for part in karmarkar_karp(lengths, range(24), 14)) == 21
    (rank,) = pack_by_tokens(lengths, [range(24)], dp=1, max_tokens=20, multiple_of=2)
    assert len(rank[0]) == 14 and all(0 < sum(lengths[i] for i in micro) <= 20 for micro in rank[0])


def test_fixed_size_cuts_in_order() -> None:
    (rank,) = pack_by_count([1] * 7, [range(7)], dp=1, micro_batch_size=3)
    assert rank[0] == [[0, 1], [2, 3], [4, 5, 6]]
    (rank,) = pack_by_count([1] * 8, [range(8)], dp=1, micro_batch_size=4, multiple_of=4)
    assert rank[0] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_sequence_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, more than ppo_max_token_len_per_gpu = 10"):
        pack_by_tokens([3, 11], [range(2)], dp=1, max_tokens=10)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, MAX_TOKENS // 3), min_size=3, max_size=42).map(lambda x: x[: len(x) // 3 * 3]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3),
    st.integers(3, 10),
)
def test_neighbours_stay_together(
    lengths: list[int], dp: int, multiple_of: int, balance: bool, size: int, count: int
) -> None:
    """Three at a time, in order, next to each other; whole within the budget of tokens, or of sequences."""
    mini_batches = [range(i, min(i + 3 * size, len(lengths))) for i in range(0, len(lengths), 3 * size)]
    layout = {"dp": dp, "multiple_of": multiple_of, "balance": balance, "together": 3}
    by_tokens = pack_by_tokens(lengths, mini_batches, max_tokens=MAX_TOKENS, **layout)  # type: ignore[arg-type]
    by_count = pack_by_count(lengths, mini_batches, micro_batch_size=count, **layout)  # type: ignore[arg-type]
    for plan in (by_tokens, by_count):
        for k, mini_batch in enumerate(mini_batches):
            micros = [micro for rank in plan for micro in rank[k]]
            assert sorted(i for micro in micros for i in micro) == list(mini_batch)
            assert len({len(rank[k]) for rank in plan}) == 1 and len(plan[0][k]) % multiple_of == 0
            for micro in micros:
                assert all(
                    micro[i] % 3 == 0 and micro[i : i + 3] == [*range(micro[i], micro[i] + 3)]
                    for i in range(0, len(micro), 3)
                )
    assert all(sum(lengths[i] for i in micro) <= MAX_TOKENS for rank in by_tokens for m in rank for micro in m)
    assert all(len(micro) <= count for rank in by_count for m in rank for micro in m)


def test_pairs_over_the_budget_are_refused() -> None:
    said = "sequences 2 to 3 have 11 tokens, more than ppo_max_token_len_per_gpu = 10: raise it to 2 x "
    with pytest.raises(ValueError, match=said):
        pack_by_tokens([5, 5, 3, 8], [range(4)], dp=1, max_tokens=10, together=2)
    with pytest.raises(ValueError, match="ppo_micro_batch_size_per_gpu = 1 is less than the 2 of a pair"):
        pack_by_count([5, 5], [range(2)], dp=1, micro_batch_size=1, together=2)

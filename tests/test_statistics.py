"""Estimates from several samples against enumeration of all subsets, and against plain references."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.evaluation import statistics
from megarl.evaluation.answers import answer_in
from megarl.evaluation.comparison import compare_sources, pair
from megarl.evaluation.folder import Finished, new_folder, read_evaluation, remove_unused, write_evaluation
from megarl.evaluation.records import Record, read_records
from megarl.evaluation.statistics import estimate, majority_at_k, mcnemar, paired, pass_at_k, powers_of_two
from megarl.evaluation.summary import metrics, summarize

SAMPLES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8)


def over_subsets(n: int, k: int, value: Callable[[Sequence[int]], float]) -> float:
    """The mean over all subsets of k of n."""
    values = [value(subset) for subset in itertools.combinations(range(n), k)]
    return math.fsum(values) / len(values)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(over_subsets(n, k, lambda drawn: float(min(drawn) < c)), abs=1e-12)


def test_pass_at_k_is_stable_where_binomials_overflow() -> None:
    """Against the same formula in whole numbers."""
    for n, c, k in ((10_000, 3, 100), (10_000, 5_000, 2), (4096, 1, 4096), (10_000, 1, 1)):
        exact = 1 - math.comb(n - c, k) / math.comb(n, k) if n - c >= k else 1.0
        assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-9)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)


@settings(max_examples=100, deadline=None)
@given(SAMPLES, st.data())
def test_majority_at_k_is_the_mean_over_all_subsets_and_ties(
    samples: list[tuple[str | None, bool]], data: st.DataObject
) -> None:
    n, k = len(samples), data.draw(st.integers(1, len(samples)))
    answers, right = [answer for answer, _ in samples], [float(r) for _, r in samples]

    def value(answer: str) -> float:
        return float(np.mean([r for a, r in zip(answers, right, strict=True) if a == answer]))

    def vote(drawn: Sequence[int]) -> float:
        votes = Counter(answers[i] for i in drawn if answers[i] is not None)
        won = [value(a) for a, count in votes.items() if a is not None and count == max(votes.values())]
        return sum(won) / len(won) if won else 0.0

    assert majority_at_k(answers, right, k) == pytest.approx(over_subsets(n, k, vote), abs=1e-12)


def test_majority_of_many_samples_is_drawn_alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    answers = [rng.choice("aaabbcdefg") for _ in range(90)]
    right = [float(answer in "bd") for answer in answers]
    drawn = majority_at_k(answers, right, 60)
    assert drawn == majority_at_k(answers, right, 60)
    monkeypatch.setattr(statistics, "EXACT_COST", 10**9)
    exact = majority_at_k(answers, right, 60)
    assert drawn != exact and drawn == pytest.approx(exact, abs=4 * 0.5 / math.sqrt(statistics.SUBSETS))


def test_powers_of_two_end_with_n() -> None:
    assert [powers_of_two(n) for n in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]


def test_an_estimate_against_numpy() -> None:
    values = np.random.default_rng(0).normal(size=50).tolist()
    found = estimate(values)
    assert found is not None and found.n == 50 and found.ci95 is not None
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert found.ci95 == pytest.approx(1.959964 * np.std(values, ddof=1) / math.sqrt(50), rel=1e-6)
    assert estimate([]) is None
    assert [estimate(one).ci95 for one in ([0.5], [0.0] * 20)] == [None, None]  # type: ignore[union-attr]


def test_the_interval_holds_the_truth_although_samples_of_a_prompt_are_alike() -> None:
    """60 prompts with 8 samples each, 1,000 times: one that took 480 samples for independent would hold it far less."""
    rng, clustered, naive = np.random.default_rng(1), 0, 0
    for _ in range(1000):
        chance = rng.beta(0.5, 0.5, size=60)  # its mean is 0.5, and most prompts are easy or hard
        right = rng.random((60, 8)) < chance[:, None]
        found = estimate(right.mean(1).tolist())
        assert found is not None and found.ci95 is not None
        clustered += abs(found.mean - 0.5) <= found.ci95
        naive += abs(found.mean - 0.5) <= 1.96 * math.sqrt(found.mean * (1 - found.mean) / 480)
    assert 930 <= clustered <= 970 and naive < 700


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_against_the_binomial(a_only: int, b_only: int) -> None:
    n = a_only + b_only
    as_far = [x for x in range(n + 1) if abs(x - n / 2) >= abs(a_only - n / 2)]
    assert mcnemar(a_only, b_only) == pytest.approx(sum(math.comb(n, x) for x in as_far) / 2**n)


def test_a_permutation_test_tries_all_signs() -> None:
    a, b = [0.9, 0.2, 0.75, 0.5, 0.1, 0.3], [0.1, 0.25, 0.5, 0.5, 0.0, 0.6]
    found = paired(a, b)
    d = [x - y for x, y in zip(a, b, strict=True) if x != y]
    signs = itertools.product((1, -1), repeat=len(d))
    as_large = [abs(sum(s * x for s, x in zip(one, d, strict=True))) >= abs(sum(d)) - 1e-12 for one in signs]
    assert found is not None and found.test == "permutation" and (found.a_only, found.b_only) == (3, 2)
    assert found.p == pytest.approx(np.mean(as_large))
    assert found.difference.mean == pytest.approx(sum(d) / 6) and found.difference.n == 6


def test_sampled_signs_agree_with_mcnemar() -> None:
    """Doubled differences are no right or wrong any more, but have the same p."""
    a, b = [1.0] * 30 + [0.0] * 14 + [1.0] * 6, [0.0] * 30 + [1.0] * 14 + [1.0] * 6
    exact, doubled = paired(a, b), paired([2 * x for x in a], [2 * x for x in b])
    assert exact is not None and doubled is not None
    assert (exact.test, doubled.test) == ("McNemar", "permutation (sampled)")
    assert exact.p == pytest.approx(mcnemar(30, 14)) == pytest.approx(doubled.p, abs=0.005)
    assert paired([1.0, 0.0], [1.0, 0.0]).p == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("6*7\nThe answer is: $1,042$.", "1042"),
        ("so \\boxed{1} and then \\boxed{\\frac{1}{2}} is it", "\\frac{1}{2}"),
        ("\\boxed{3} but \\boxed{never closes", "3"),
        ("<answer>4</answer> or <answer> Five  Six. </answer>", "five six"),
        ("5 + 5 = 10\n#### 10\nwell", "10"),
        ("12", "12"),
        (" 12. \n\n", "12"),
        ("Final Answer = B", "b"),
        ("", None),
        (" \n ", None),
        ("The answer is", None),
    ],
)
def test_the_answer_in_a_response(response: str, answer: str | None) -> None:
    assert answer_in(response) == answer


@pytest.mark.parametrize("opening", ["\\boxed{", "<answer>", "{", "####\n", "answer"])
def test_hostile_responses_take_no_time(opening: str) -> None:
    """A search that begins anew at each opening would go on for hours."""
    assert str(answer_in(opening * 500_000 + "\nThe answer is 7")).endswith("7")


# --------------------------------------------------------------------------------------------------------- records


def record(index: int, sample: int, score: float | None, vote: str | None = None, **more: object) -> Record:
    plain = Record(
        index=index,
        sample=sample,
        source="gsm8k" if index < 2 else "math",
        row=str(index),
        prompt=f"{index}?",
        response=f"r{score}",
        answer="1",
        vote=vote,
        score=score,
        finish="stop",
        tokens=4,
    )
    return replace(plain, **more)  # type: ignore[arg-type]


RECORDS = [
    record(0, 0, 1.0, "1"),
    record(0, 1, 0.0, "2", finish="length", tokens=8),
    record(0, 2, 1.0, "1"),
    record(1, 0, 0.0, "3"),
    record(1, 1, None),
    record(1, 2, 1.0, "1"),
    record(2, 0, 0.5, "4"),
    record(2, 1, 0.5, "5"),
    record(2, 2, 0.5, None),
]


def test_a_summary_by_hand() -> None:
    """A response without a score is no sample: of prompt 1 two are left, and it is not in pass@3."""
    gsm8k, math_, overall = summarize(RECORDS)
    assert (gsm8k.source, gsm8k.prompts, gsm8k.responses, gsm8k.failed) == ("gsm8k", 2, 6, 1)
    assert gsm8k.mean is not None and gsm8k.mean.mean == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert [gsm8k.pass_at[k].mean for k in (1, 2, 3)] == pytest.approx([(2 / 3 + 1 / 2) / 2, 1.0, 1.0])
    assert gsm8k.pass_at[3].n == 1 and gsm8k.pass_at[2].n == 2
    assert [gsm8k.maj_at[k].mean for k in (2, 3)] == pytest.approx([(2 / 3 + 1 / 2) / 2, 1.0])
    assert (gsm8k.length, gsm8k.truncated) == (pytest.approx(28 / 6), pytest.approx(1 / 6))
    assert math_.mean is not None and math_.mean.mean == 0.5 and math_.mean.ci95 is None
    assert overall.source == "" and overall.prompts == 3 and set(overall.pass_at) == {1, 2, 3}
    named = metrics([gsm8k, math_, overall])
    assert named["gsm8k/maj@3"] == 1.0 and named["math/mean"] == 0.5 and named["pass@2"] == pytest.approx(2 / 3)
    assert named["reward_ci95"] == overall.mean.ci95 and "math/mean_ci95" not in named  # type: ignore[union-attr]
    assert set(summarize(RECORDS, [2])[2].pass_at) == {2}


def test_a_column_that_differs_in_every_row_names_no_source() -> None:
    (overall,) = summarize([record(i, 0, 1.0, source=str(i)) for i in range(65)])
    assert overall.source == "" and overall.prompts == 65 and set(metrics([overall])) == set()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Finished, Finished]]:
    changed = [replace(one, score=1.0) if one.index == 2 else one for one in RECORDS]
    for name, records in (("a", changed), ("b", RECORDS)):
        (tmp_path / name).mkdir()
        write_evaluation(str(tmp_path / name), {"model": name, "n": 3}, records, summarize(records))
    yield read_evaluation(str(tmp_path / "a")), read_evaluation(str(tmp_path / "b"))


def test_two_evaluations_by_hand(two: tuple[Finished, Finished]) -> None:
    a, b = two
    assert list(b.records) == RECORDS and b.settings == {"model": "b", "n": 3}
    gsm8k, math_, overall = compare_sources(pair(a, b))
    assert gsm8k.mean.difference.mean == 0.0 and gsm8k.mean.p == 1.0
    assert math_.mean.difference.mean == 0.5 and math_.accuracy.difference.mean == 1.0
    assert overall.prompts == 3 and overall.mean.a_only == 1 and overall.accuracy.test == "McNemar"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row": "x"}, r"^prompt 2 has another text in '.*a' than in '.*b': evaluate both on the same files$"),
        ({"answer": "x"}, r"^prompt 2 has another answer in '.*a' than in '.*b'"),
        ({"index": 7}, r"^'.*b' has no prompt 2, and '.*a' has: evaluate both on the same files$"),
    ],
)
def test_other_prompts_are_refused_by_name(
    two: tuple[Finished, Finished], change: dict[str, object], said: str
) -> None:
    a, b = two
    records = [replace(one, **change) if one.index == 2 else one for one in b.records]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        pair(a, replace(b, records=records))


def test_samples_that_are_none_are_refused(two: tuple[Finished, Finished], tmp_path: Path) -> None:
    file = tmp_path / "a" / "samples.jsonl"
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole + b"{}\n", whole.replace(b'"index": 0', b'"index": "0"'), b"\xff\n"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"(is no sample that megarl eval writes; evaluate again|cannot be read)"):
            read_records(str(file))
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no samples"):
        read_evaluation(str(tmp_path / "a"))
    (tmp_path / "a" / "eval.json").write_text('{"n": 3}')
    with pytest.raises(ValueError, match=r"is not what megarl eval writes; evaluate again$"):
        read_evaluation(str(tmp_path / "a"))
    (tmp_path / "a" / "eval.json").write_text("[")
    with pytest.raises(ValueError, match=r"is not what megarl eval writes \(JSONDecodeError\); evaluate again$"):
        read_evaluation(str(tmp_path / "a"))


def test_a_folder_is_made_for_one_evaluation(tmp_path: Path) -> None:
    wanted = str(tmp_path / "eval" / "step")
    assert [new_folder(wanted, exact=False) for _ in range(3)] == [wanted, f"{wanted}-2", f"{wanted}-3"]
    Path(wanted, "eval.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds something already, and nothing is overwritten: name a new folder$"):
        new_folder(wanted, exact=True)
    Path(f"{wanted}-2", "config.yaml").write_text("")
    for name in (wanted, f"{wanted}-2"):
        remove_unused(name)
    assert Path(wanted, "eval.json").exists() and not Path(f"{wanted}-2").exists()

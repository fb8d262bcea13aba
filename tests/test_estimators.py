"""Advantage estimators against plain loops over lists, on random jagged batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.group_scores import GroupScores
from megarl.algorithms.registry import ESTIMATORS
from megarl.algorithms.returns import value_targets
from megarl.algorithms.whitening import whitened
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch, batch_of


@dataclass(kw_only=True)
class Response:
    """One sequence. Lists hold a number per response token; `mask` says which are trained: none if it has no score."""

    group: int
    prompt: int
    mask: list[bool]
    score: float
    greedy: float
    rewards: list[float]
    values: list[float]
    old: list[float]
    teacher: list[float]

    def trained(self, column: list[float]) -> list[float]:
        return [x for x, trained in zip(column, self.mask, strict=True) if trained]

    @property
    def length(self) -> int:
        return sum(self.mask)

    @property
    def last(self) -> int:
        """Place of the last trained token."""
        return len(self.mask) - 1 - self.mask[::-1].index(True)


UNTRAINED = 1e9
"""Stands at tokens and in the scores that no estimator may look at."""


def batch_of_responses(responses: list[Response]) -> Batch:
    lengths = [r.prompt + len(r.mask) for r in responses]

    def column(name: str) -> torch.Tensor:
        per_token = []
        for r in responses:
            kept = [x if trained else UNTRAINED for x, trained in zip(getattr(r, name), r.mask, strict=True)]
            per_token += [UNTRAINED] * r.prompt + kept
        return torch.tensor(per_token, dtype=torch.float32)

    return Batch(
        tokens=torch.arange(sum(lengths)),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=torch.tensor([x for r in responses for x in [False] * r.prompt + r.mask], dtype=torch.bool),
        groups=torch.tensor([r.group for r in responses]),
        rewards=torch.tensor([r.score if r.length else UNTRAINED for r in responses]),
        greedy_rewards=torch.tensor([r.greedy for r in responses]),
        token_rewards=column("rewards"),
        values=column("values"),
        old_logp=column("old"),
        teacher_logp=column("teacher"),
    )


def estimate(name: str, responses: list[Response], config: AlgorithmConfig) -> list[list[float]]:
    """The advantages of each response's trained tokens."""
    batch = batch_of_responses(responses)
    advantages = ESTIMATORS.load(name)(batch, config)
    assert advantages.dtype == torch.float32 and advantages.shape == batch.tokens.shape
    return by_response(batch, advantages)


def by_response(batch: Batch, per_token: torch.Tensor) -> list[list[float]]:
    spans = [slice(start, end) for start, end in pairwise(batch.cu_seqlens.tolist())]
    return [per_token[span][batch.response_mask[span]].tolist() for span in spans]


# ------------------------------------------------------------------------------------------------ plain references


def rivals(responses: list[Response], of: Response) -> list[Response]:
    """The scored responses of a group, itself included."""
    return [r for r in responses if r.group == of.group and r.length]


def per_response(value: Callable[[Response, list[Response]], float]) -> Callable[..., list[list[float]]]:
    def reference(responses: list[Response], config: AlgorithmConfig) -> list[list[float]]:
        return [[value(r, rivals(responses, r))] * r.length if r.length else [] for r in responses]

    return reference


def from_mean(r: Response, group: list[Response]) -> float:
    if len({x.score for x in group}) == 1:
        return 0.0
    return r.score - math.fsum(x.score for x in group) / len(group)


def spread(group: list[Response]) -> float:
    if len({x.score for x in group}) == 1:
        return 0.0
    mean = math.fsum(x.score for x in group) / len(group)
    return math.sqrt(math.fsum((x.score - mean) ** 2 for x in group) / (len(group) - 1))


def from_the_others(r: Response, group: list[Response]) -> float:
    others = [x.score for x in group if x is not r]
    if not others or set(others) == {r.score}:
        return 0.0
    return r.score - math.fsum(others) / len(others)


def from_mean_by_length(r: Response, group: list[Response]) -> float:
    if len({x.score for x in group}) == 1:
        return 0.0
    return r.score - math.fsum(x.length * x.score for x in group) / sum(x.length for x in group)


def is_chosen(r: Response, group: list[Response]) -> float:
    scores = sorted(x.score for x in group)
    return 1.0 if r.score == scores[-1] and scores[0] != scores[-1] else 0.0


def lost_without(r: Response, group: list[Response]) -> float:
    """max over all - max over the others: how much better the group's best is for having this response."""
    others = [x.score for x in group if x is not r]
    return max(x.score for x in group) - max(others) if others else 0.0


def by_spread(value: Callable[[Response, list[Response]], float]) -> Callable[..., list[list[float]]]:
    def reference(responses: list[Response], config: AlgorithmConfig) -> list[list[float]]:
        def scaled(r: Response, group: list[Response]) -> float:
            return value(r, group) / ((spread(group) + 1e-6) if config.norm_adv_by_std_in_grpo else 1.0)

        return per_response(scaled)(responses, config)

    return reference


def white(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    if len(set(flat)) < 2:
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def plain_gae(r: Response, gamma: float, lam: float) -> list[float]:
    """Eq. 16 as it stands: a sum over all later errors, for every token."""
    rewards, values = r.trained(r.rewards), [*r.trained(r.values), 0.0]
    errors = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(r.length)]
    return [math.fsum((gamma * lam) ** k * e for k, e in enumerate(errors[t:])) for t in range(r.length)]


def plain_returns(r: Response, gamma: float) -> list[float]:
    rewards = r.trained(r.rewards)
    return [math.fsum(gamma**k * x for k, x in enumerate(rewards[t:])) for t in range(r.length)]


REFERENCES: dict[str, Callable[[list[Response], AlgorithmConfig], list[list[float]]]] = {
    "gae": lambda rs, config: white([plain_gae(r, config.gamma, config.lam) for r in rs]),
    "grpo": by_spread(from_mean),
    "dr_grpo": per_response(from_mean),
    "rloo": per_response(from_the_others),
    "opo": per_response(from_mean_by_length),
    "raft": per_response(is_chosen),
    "grpo_passk": by_spread(lost_without),
    "remax": per_response(lambda r, group: r.score - r.greedy),
    "reinforce_plus_plus": lambda rs, config: white([plain_returns(r, config.gamma) for r in rs]),
    "reinforce_plus_plus_baseline": lambda rs, config: white(per_response(from_mean)(rs, config)),
    "on_policy_distillation": lambda rs, config: [
        [t - o for t, o in zip(r.trained(r.teacher), r.trained(r.old), strict=True)] for r in rs
    ],
}
WITHIN_GROUPS = ["grpo", "dr_grpo", "rloo", "opo", "raft", "grpo_passk"]

# ------------------------------------------------------------------------------------------------- random batches

NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0]), st.sampled_from([0.7, -1.0]), st.integers(-80, 80).map(lambda x: x / 8)
)
SCORES = st.one_of(NUMBERS, NUMBERS, st.sampled_from([1e30, -1e30, 3e29]))
CONFIGS = st.builds(
    AlgorithmConfig,
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lam=st.sampled_from([1.0, 0.95, 0.4, 0.0]),
    norm_adv_by_std_in_grpo=st.booleans(),
)


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


@st.composite
def batches(draw: st.DrawFn, scores: st.SearchStrategy[float] = SCORES) -> list[Response]:
    """Up to 4 groups, in any order; responses of 0 to 7 tokens, some of which are masked, in some all."""
    noise = random.Random(draw(st.integers(0, 2**16)))
    responses = []
    for _ in range(draw(st.integers(1, 12))):
        mask = draw(st.lists(st.sampled_from([True, True, True, False]), max_size=7))
        score = float32(draw(scores))

        def column(mask: list[bool] = mask) -> list[float]:
            return [float32(noise.gauss(0, 1)) for _ in mask]

        rewards = [noise.choice([0.0, x]) for x in column()]
        if True in mask:
            last = len(mask) - 1 - mask[::-1].index(True)
            rewards[last] = float32(rewards[last] + score)  # else the batch has another number than the references
        response = Response(
            group=draw(st.integers(0, 3)),
            prompt=draw(st.integers(1, 3)),
            mask=mask,
            score=score,
            greedy=float32(draw(NUMBERS)),
            rewards=rewards,
            values=column(),
            old=column(),
            teacher=column(),
        )
        responses.append(response)
    return responses


def assert_close(got: list[list[float]], wanted: list[list[float]], sizes: list[float] | None = None) -> None:
    """To float32, and to what float64 leaves of the numbers that were added: at most `sizes`, one per response."""
    assert [len(row) for row in got] == [len(row) for row in wanted]
    sizes = [max(map(abs, row), default=0.0) for row in wanted] if sizes is None else sizes
    for row, plain, size in zip(got, wanted, sizes, strict=True):
        assert row == pytest.approx(plain, rel=2e-6, abs=1e-6 + 1e-13 * size)


def largest_scores(responses: list[Response]) -> list[float]:
    """Of each one's group."""
    return [max((abs(x.score) for x in rivals(responses, r)), default=0.0) for r in responses]


def test_every_estimator_has_a_reference() -> None:
    assert sorted(REFERENCES) == ESTIMATORS.names()


@settings(deadline=None, max_examples=100)
@given(responses=batches(), config=CONFIGS)
def test_against_the_plain_formula(responses: list[Response], config: AlgorithmConfig) -> None:
    for name, reference in REFERENCES.items():
        note(name)
        sizes = largest_scores(responses) if name in WITHIN_GROUPS else None
        assert_close(estimate(name, responses, config), reference(responses, config), sizes)


@settings(deadline=None)
@given(responses=batches(), config=CONFIGS)
def test_value_targets(responses: list[Response], config: AlgorithmConfig) -> None:
    batch = batch_of_responses(responses)
    got = value_targets(batch, config.gamma, config.lam)
    assert not got[~batch.response_mask].any()
    wanted = [
        [a + v for a, v in zip(plain_gae(r, config.gamma, config.lam), r.trained(r.values), strict=True)]
        for r in responses
    ]
    assert_close(by_response(batch, got), wanted)
    if config.lam == 1.0:  # then the values cancel: Monte Carlo returns
        assert_close(by_response(batch, got), [plain_returns(r, config.gamma) for r in responses])


@settings(deadline=None, max_examples=30)
@given(responses=batches(), score=SCORES)
def test_equal_scores_teach_exactly_nothing(responses: list[Response], score: float) -> None:
    for r in responses:
        r.score = float32(score)
        r.rewards = [0.0] * len(r.mask)
        if r.length:
            r.rewards[r.last] = r.score
    for name in [*WITHIN_GROUPS, "reinforce_plus_plus", "reinforce_plus_plus_baseline"]:
        note(name)
        assert not any(x for row in estimate(name, responses, AlgorithmConfig()) for x in row)


@pytest.mark.parametrize("score", [0.7, 0.0, 1e30])
def test_equal_errors_of_the_critic_teach_exactly_nothing(score: float) -> None:
    """Equal scores, values and lengths of one token; with longer responses the errors differ."""
    responses = [response(float32(score), i % 3) for i in range(33)]
    assert estimate("gae", responses, AlgorithmConfig()) == [[0.0]] * 33


@pytest.mark.parametrize("number", [0.1, 1e30 / 3])
@pytest.mark.parametrize("n", [37, 300])
def test_equal_numbers_are_exactly_0_whatever_their_mean_rounds_to(number: float, n: int) -> None:
    equal = torch.full((n,), number, dtype=torch.float64)
    assert sum(equal.tolist()) / n != number
    assert not whitened(batch_of([()] * n, [(1,)] * n, range(n)), equal).any()
    of = GroupScores(scores=equal, groups=torch.zeros(n, dtype=torch.int64))
    assert not of.centred().any() and not of.std().any()
    assert not of.centred(torch.arange(1.0, n + 1, dtype=torch.float64)).any()


@settings(deadline=None, max_examples=30)
@given(responses=batches(), config=CONFIGS, seed=st.integers(0, 1000))
def test_sequences_in_another_order(responses: list[Response], config: AlgorithmConfig, seed: int) -> None:
    order = random.Random(seed).sample(range(len(responses)), len(responses))
    shuffled = [responses[i] for i in order]
    for name in REFERENCES:
        note(name)
        before, after = (estimate(name, rs, config) for rs in (responses, shuffled))
        sizes = largest_scores(shuffled) if name in WITHIN_GROUPS else None
        assert_close(after, [before[i] for i in order], sizes)


@settings(deadline=None, max_examples=30)
@given(responses=batches(), config=CONFIGS)
def test_a_sequence_without_a_score_takes_no_part(responses: list[Response], config: AlgorithmConfig) -> None:
    scored = [r for r in responses if r.length]
    for name in REFERENCES if scored else ():
        note(name)
        with_others = estimate(name, responses, config)
        kept = [row for r, row in zip(responses, with_others, strict=True) if r.length]
        assert kept == estimate(name, scored, config)


@settings(deadline=None, max_examples=50)
@given(responses=batches(), config=CONFIGS, seed=st.integers(0, 1000))
def test_a_response_in_several_parts_is_compared_once(
    responses: list[Response], config: AlgorithmConfig, seed: int
) -> None:
    """Cut into sequences of one episode, its tokens have the advantages that they have in one piece."""
    whole, draw = batch_of_responses(responses), random.Random(seed)
    cuts, of = [0], list[int]()
    for i, (r, end) in enumerate(zip(responses, whole.cu_seqlens[1:].tolist(), strict=True)):
        inside = range(end - len(r.mask) + 1, end)
        cuts += [*sorted(draw.sample(inside, min(len(inside), draw.randint(0, 2)))), end]
        of += [i] * (len(cuts) - 1 - len(of))
    assert whole.rewards is not None and whole.greedy_rewards is not None
    parts = whole.with_(
        cu_seqlens=torch.tensor(cuts),
        groups=whole.groups[of],
        episodes=torch.tensor(of),
        rewards=whole.rewards[of],
        greedy_rewards=whole.greedy_rewards[of],
    )
    for name in [*WITHIN_GROUPS, "remax", "reinforce_plus_plus_baseline"]:
        note(name)
        one, several = (ESTIMATORS.load(name)(batch, config)[whole.response_mask] for batch in (whole, parts))
        if name == "reinforce_plus_plus_baseline":  # in standard deviations, whose sums are taken sequence by sequence
            torch.testing.assert_close(several, one, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(several, one)


def test_kl_in_the_reward_is_that_of_all_parts() -> None:
    """Three tokens against a reference, in one piece and in two."""
    config = AlgorithmConfig(use_kl_in_reward=True, kl_penalty="k1")
    whole = batch_of_responses([response(1.0, tokens=3), response(0.0, tokens=2)])
    whole = whole.with_(old_logp=torch.zeros(len(whole.tokens)), ref_logp=-torch.arange(len(whole.tokens)).float())
    parts = whole.with_(
        cu_seqlens=torch.tensor([0, 2, 4, 7]),
        groups=torch.zeros(3, dtype=torch.int64),
        episodes=torch.tensor([0, 0, 1]),
        rewards=torch.tensor([1.0, 1.0, 0.0]),
    )
    in_one, in_two = (compute_advantages(batch, config, 0.1).advantages for batch in (whole, parts))
    assert in_one is not None and in_two is not None and in_one.any()
    assert torch.allclose(in_one, in_two, rtol=1e-6)


def response(score: float, group: int = 0, tokens: int = 1) -> Response:
    zeros = [0.0] * tokens
    rewards = [*zeros[1:], score]
    return Response(
        group=group,
        prompt=1,
        mask=[True] * tokens,
        score=score,
        greedy=0.25,
        rewards=rewards,
        values=zeros,
        old=zeros,
        teacher=zeros,
    )


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@pytest.mark.parametrize("score", [5.0, -1e30])
def test_a_response_alone_in_its_group_has_advantage_0(name: str, score: float) -> None:
    """Its prompt had one sample, or the others were not scored."""
    unscored = response(3.0)
    unscored.mask = [False]
    got = estimate(name, [response(score, group=1), unscored, response(score), response(0.0, 2)], AlgorithmConfig())
    assert got == [[0.0], [], [0.0], [0.0]]


def test_a_response_alone_in_its_group_is_an_average_one_before_whitening() -> None:
    """Centred scores 0, 1 and -1 of one token each have mean 0 and deviation 1."""
    got = estimate("reinforce_plus_plus_baseline", [response(9.0, 1), response(2.0), response(0.0)], AlgorithmConfig())
    assert got == [[0.0], [pytest.approx(1.0)], [pytest.approx(-1.0)]]


BY_HAND: dict[str, list[float]] = {
    "dr_grpo": [0.75, -0.25, -0.25, -0.25],
    "rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
    "opo": [0.5, -0.5, -0.5, -0.5],
    "raft": [1.0, 0.0, 0.0, 0.0],
    "grpo": [1.5, -0.5, -0.5, -0.5],
    "grpo_passk": [2.0, 0.0, 0.0, 0.0],
    "remax": [0.75, -0.25, -0.25, -0.25],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    """Scores 1, 0, 0, 0, the first response as long as the others together; the deviation is 0.5."""
    responses = [response(1.0, tokens=3), response(0.0), response(0.0), response(0.0)]
    got = estimate(name, responses, AlgorithmConfig())
    assert [row[0] for row in got] == pytest.approx(BY_HAND[name], abs=1e-5)
    assert got[0] == [got[0][0]] * 3


def test_responses_that_share_the_best_score() -> None:
    """Either alone would do: none decides the group's best, and both are as good to learn."""
    responses = [response(1.0), response(0.0), response(1.0)]
    assert estimate("grpo_passk", responses, AlgorithmConfig()) == [[0.0], [0.0], [0.0]]
    assert estimate("raft", responses, AlgorithmConfig()) == [[1.0], [0.0], [1.0]]


def test_gae_by_hand() -> None:
    """gamma 0.5, lam 0.25, values 4 and 2, reward 1 at the end: errors 0.5 x 2 - 4 = -3 and 1 - 2 = -1."""
    one = response(1.0, tokens=3)
    one.mask, one.values, one.rewards = [True, False, True], [4.0, 77.0, 2.0], [0.0, 55.0, 1.0]
    batch = batch_of_responses([one])
    targets = value_targets(batch, 0.5, 0.25)
    assert targets.tolist() == [0.0, -3 - 0.125 + 4, 0.0, -1 + 2]
    got = estimate("gae", [one], AlgorithmConfig(gamma=0.5, lam=0.25))
    assert got == [[pytest.approx(-math.sqrt(0.5)), pytest.approx(math.sqrt(0.5))]]


def test_the_reward_with_kl_reaches_the_tokens_before_it() -> None:
    """Through `compute_advantages`: KL of 2 nats at the second of two tokens, coefficient 0.5, gamma 1."""
    a, b = response(1.0, tokens=2), response(1.0, 1, tokens=2)
    a.old = [0.0, 2.0]
    batch = batch_of_responses([a, b]).with_(ref_logp=torch.zeros(6))
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", use_kl_in_reward=True)
    out = compute_advantages(batch, config, 0.5)
    assert out.advantages is not None
    x = math.sqrt(0.75)  # returns 0, 0, 1, 1
    assert out.advantages.tolist() == pytest.approx([0, -x, -x, 0, x, x])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_batch_in_which_nothing_is_trained(name: str) -> None:
    unscored = response(3.0)
    unscored.mask = [False]
    assert estimate(name, [unscored, unscored], AlgorithmConfig()) == [[], []]

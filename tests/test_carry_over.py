"""Responses that outlive a step: which are trained on, how old they get, and that a run with them repeats itself."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_weights import random_weights, source_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from run_cases import run_here
from test_resume import same
from tiny_families import ARCHITECTURES
from tiny_run import FINGERPRINT, metrics_of, numbers_of, write_run
from training_cases import Case, actor_in, hybrid_of

from megarl.checkpoint.manifest import files_of, record_files, write_manifest
from megarl.config import Config, build_config, load_config
from megarl.rollout.replicas import Quota, begin_rollouts, replicas_of_groups
from megarl.trainer.admission.checks import check_run
from megarl.trainer.experience.carry_over import CarryOver, _digest
from megarl.types import Prompt, Rollout, Rollouts, SamplingParams, Tokens

PROMPTS = [Prompt(index=i, token_ids=(3 + i, 5, 7, *range(20, 20 + 3 * (i % 4))), row={}) for i in range(12)]


def test_a_prompt_that_is_drawn_twice_is_answered_twice() -> None:
    """Alone, or drawn once, it has the seeds that it always had."""
    once, twice = (begin_rollouts(PROMPTS[:1] * times, 4, seed=1, round_=3) for times in (1, 2))
    assert [r.seed for r in twice[:4]] == [r.seed for r in once] and len({r.seed for r in twice}) == 8
    assert [(r.group, r.sample) for r in twice] == [(group, sample) for group in (0, 1) for sample in range(4)]


# ------------------------------------------------------------------------------------------------------- bookkeeping


def _config(groups: int, batch: int, staleness: int, n: int, replicas: int = 1) -> Config:
    carry_over = {"enable": True, "groups": groups, "max_staleness": staleness}
    return build_config(
        {
            "data": {"train_batch_size": batch},
            "actor_rollout_ref": {"rollout": {"n": n, "carry_over": carry_over}},
            "trainer": {"n_gpus_per_node": replicas},
        }
    )


def _go_on(carry_over: CarryOver, *saved: CarryOver, parts: list[dict[str, Any]] | None = None) -> None:
    """As after the files of some ranks."""
    carry_over.load_state(json.loads(json.dumps(saved[0].state())))
    read = []
    for arrays in parts or [of_rank.arrays() for of_rank in saved]:
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        stream.seek(0)
        read.append(dict(np.load(stream, allow_pickle=False)))
    carry_over.load_arrays(read)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("token_ids", np.zeros(3, np.int64)),
        ("token_ids", np.full(3, -1, np.int32)),
        ("logp", np.zeros(3)),
        ("length", np.array([3.0])),
        ("length", np.array(3)),
        ("spans", np.array([1, 3])),
        ("group", np.array(0)),
        ("finish_reason", np.array([99])),
        ("prompt", np.array([-1])),
        ("span_count", np.array([2])),
        ("seed", np.zeros(0, np.int64)),
        ("order", np.array([1])),
    ],
)
def test_arrays_of_another_form_are_refused(name: str, changed: np.ndarray[Any, Any]) -> None:
    carry_over = CarryOver(_config(4, 2, 2, 1), PROMPTS)
    whole = {one: np.zeros(1, np.int64) for one in ("prompt", "group", "sample", "seed", "finish_reason")}
    whole["prompt_digest"] = np.array([_digest(PROMPTS[0])])
    whole |= {"length": np.array([3]), "span_count": np.array([1]), "spans": np.array([[1, 3]])}
    tokens = {"token_ids": np.zeros(3, np.int32), "logp": np.zeros(3, np.float32)}
    carry_over.load_state({"next_group": 1})
    carry_over.load_arrays([{**whole, **tokens}])
    with pytest.raises(ValueError, match=r"responses under way [^\n]+$"):
        carry_over.load_arrays([{**whole, **tokens, name: changed}])


class _Simulated:
    """Generation whose responses have lengths of their own, on replicas that decode so many tokens at a time."""

    def __init__(self, replicas: int, most: int) -> None:
        self.replicas, self.most = replicas, most

    def __call__(self, rollouts: Sequence[Rollout], quota: Quota, version: int) -> Rollouts:
        replica_of = replicas_of_groups(rollouts, self.replicas)
        made = list(rollouts)
        for replica in range(self.replicas):
            mine = [i for i, r in enumerate(rollouts) if replica_of[r.group] == replica]
            while not self._reached([made[i] for i in mine], quota, replica):
                for i in [i for i in mine if made[i].finish_reason is None][: self.most]:
                    r = made[i]
                    ends = len(r.response) + 1 == 1 + r.seed % 7 * (1 + r.seed % 5)
                    response = r.tokens.drawn([1 + r.seed % 9], [-1.0]).with_version(version)
                    made[i] = replace(r, response=response, finish_reason="stop" if ends else None)
        return Rollouts(items=tuple(made), version=version)

    def _reached(self, mine: list[Rollout], quota: Quota, replica: int) -> bool:
        unfinished = {r.group for r in mine if r.finish_reason is None}
        finished = {r.group for r in mine} - unfinished
        return len(finished) >= quota.share(replica, self.replicas) and not unfinished & quota.required


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(2, 9),
    more=st.integers(1, 9),
    staleness=st.integers(1, 4),
    n=st.integers(1, 3),
    replicas=st.integers(1, 4),
    most=st.integers(1, 30),
    stop_at=st.integers(1, 11),
)
def test_nothing_is_lost_or_too_old(
    batch: int, more: int, staleness: int, n: int, replicas: int, most: int, stop_at: int
) -> None:
    config = _config(batch + min(more, batch), batch, staleness, n, replicas)
    prompts = [replace(PROMPTS[i % 12], index=i) for i in range(40)]

    generate = _Simulated(replicas, most)

    def draw(drawn: list[int], rank: int) -> list[int]:
        drawn[rank] += batch
        return [i % len(prompts) for i in range(drawn[rank] - batch, drawn[rank])]

    def go_on(rank: int, at: int, before: Whole, after: Whole, asked: Sequence[Rollout], quota: Quota) -> Rollouts:
        made = generate([_with_tokens(r, before) for r in asked], quota, at)
        after.update({(r.group, r.sample): r.tokens for r in made})
        replica_of = replicas_of_groups(asked, replicas)
        return made.of(_seen(rank, *pair, replica_of) for pair in zip(asked, made, strict=True))

    def steps(ranks: list[CarryOver], whole: Whole, drawn: list[int], first: int, last: int) -> list[Rollouts]:
        """The batches with all tokens; `ranks` are of a replica each, and see the tokens of its responses."""
        batches = []
        for version in range(first, last):
            before, of_ranks = dict(whole), []
            for rank, carry_over in enumerate(ranks):
                made = partial(go_on, rank, version, before, whole)
                of_ranks.append(carry_over.next_batch(partial(draw, drawn, rank), made, version))
            (mine, *others) = [made.of(_with_tokens(r, whole) for r in made) for made in of_ranks]
            assert all(made == mine for made in others)
            batches.append(mine)
        return batches

    whole = [CarryOver(config, prompts, rank) for rank in range(replicas)]
    batches = steps(whole, {}, [0] * replicas, 1, 12)
    trained = [group for made in batches for group in dict.fromkeys(r.group for r in made)]
    assert len(trained) == len(set(trained)) == 11 * batch  # none twice
    for version, made in enumerate(batches, start=1):
        assert len(made) == batch * n and made.version == version
        for r in made:
            assert r.finish_reason == "stop" and len(r.response) == sum(tokens for _, tokens in r.response.versions)
            versions = [version for version, _ in r.response.versions]
            assert version - versions[0] <= staleness and versions[-1] <= version
    saved = [carry_over.arrays() for carry_over in whole]
    orders = sorted(i for arrays in saved for i in arrays["order"].tolist())
    assert orders == list(range(len(orders)))  # each response is saved by one rank
    under_way = {group for arrays in saved for group in arrays["group"].tolist()}
    assert under_way | set(trained) == set(range(len(under_way) + len(trained)))  # none left out
    assert min(under_way) > max(trained) - 3 * batch * staleness

    first, drawn, tokens = [CarryOver(config, prompts, rank) for rank in range(replicas)], [0] * replicas, Whole()
    before = steps(first, tokens, drawn, 1, stop_at)
    second = [CarryOver(config, prompts, rank) for rank in range(replicas)]
    for carry_over in second:
        _go_on(carry_over, *first)
        assert carry_over.state() == first[0].state()
    again = {i: row for carry_over in second for i, row in _rows(carry_over)}
    assert again == {i: row for carry_over in first for i, row in _rows(carry_over)}
    assert [*before, *steps(second, tokens, drawn, stop_at, 12)] == batches


Whole = dict[tuple[int, int], Tokens]
"""The tokens of all responses, by group and sample."""


def _with_tokens(rollout: Rollout, whole: Whole) -> Rollout:
    tokens = whole.get((rollout.group, rollout.sample), Tokens())
    assert len(tokens) == len(rollout.response)
    if isinstance(rollout.response, Tokens):
        assert rollout.response == tokens
    return replace(rollout, response=tokens)


def _seen(rank: int, before: Rollout, after: Rollout, replica_of: Mapping[int, int]) -> Rollout:
    """A response as a replica's rank sees it: one that goes on does so where its group is."""
    replica = replica_of[after.group]
    if before.finish_reason is not None or not len(after.response):
        return before
    return after if replica == rank else replace(after, response=after.tokens.outline(replica))


def _rows(carry_over: CarryOver) -> Iterator[tuple[int, Any]]:
    """What a rank saves of each response, by its place."""
    arrays = carry_over.arrays()
    ends, spans = arrays["length"].cumsum(), arrays["span_count"].cumsum()
    for i, order in enumerate(arrays["order"].tolist()):
        tokens = slice(ends[i] - arrays["length"][i], ends[i])
        drawn = arrays["spans"][spans[i] - arrays["span_count"][i] : spans[i]].tolist()
        numbers = [arrays[name][i] for name in ("prompt", "group", "sample", "seed", "finish_reason")]
        yield order, (numbers, arrays["token_ids"][tokens].tolist(), arrays["logp"][tokens].tolist(), drawn)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    """Of another save, twice, or without one that is lost."""
    config = _config(4, 2, 4, 1, 2)
    ranks = [CarryOver(config, PROMPTS, rank) for rank in range(2)]
    for rank, carry_over in enumerate(ranks):

        def go_on(asked: Sequence[Rollout], quota: Quota, rank: int = rank) -> Rollouts:
            made, replica_of = _Simulated(2, 2)(asked, quota, 1), replicas_of_groups(asked, 2)
            return made.of(_seen(rank, *pair, replica_of) for pair in zip(asked, made, strict=True))

        carry_over.next_batch(lambda: [0, 1], go_on, 1)
    parts = [carry_over.arrays() for carry_over in ranks]
    assert all(len(part["order"]) for part in parts)
    for wrong in ([parts[0]], [*parts, parts[1]], [parts[0], parts[0]]):
        with pytest.raises(ValueError, match=r"do not belong together: some are missing or twice$"):
            _go_on(CarryOver(config, PROMPTS), *ranks[:1], parts=wrong)
    _go_on(CarryOver(config, PROMPTS), *ranks)


def test_groups_whose_prompt_has_gone_are_left_out() -> None:
    first = CarryOver(_config(4, 2, 4, 1), PROMPTS)
    first.next_batch(lambda: [0, 1], lambda asked, quota: _Simulated(1, 2)(asked, quota, 1), 1)
    places = first.arrays()["prompt"].tolist()
    other = CarryOver(_config(4, 2, 4, 1), [PROMPTS[1], PROMPTS[1]])
    _go_on(other, first)
    assert other.arrays()["prompt"].tolist() == [place for place in places if place == 1]


def test_what_undone_steps_have_drawn_is_drawn_anew() -> None:
    """A run that goes back keeps its responses: none may hold tokens of weights that are gone."""
    carry_over = CarryOver(_config(4, 2, 9, 2), PROMPTS)
    for version in (1, 2, 3):
        carry_over.next_batch(lambda: [4, 5], lambda asked, q: _Simulated(1, 2)(asked, q, version), version)  # noqa: B023
    seen: list[Rollout] = []

    def look(asked: Sequence[Rollout], quota: Quota) -> Rollouts:
        seen.extend(asked)
        return _Simulated(1, 2)(asked, quota, 2)

    assert (carry_over.arrays()["spans"][:, 0] >= 2).any()
    carry_over.next_batch(lambda: [6, 7], look, 2)
    assert all(version < 2 for r in seen for version, _ in r.response.versions)
    assert all(bool(r.response.versions) == bool(r.response) for r in seen)


def test_tokens_know_how_old_they_are() -> None:
    response = Tokens().drawn([1], [-1.0]).with_version(4).drawn([2, 3], [-1.0] * 2).with_version(6)
    old = Rollout(prompt=PROMPTS[0], response=response)
    response = Tokens().drawn([1], [-1.0]).observed([2]).drawn([3], [-1.0]).with_version(6)
    said = replace(old, group=1, response=response, finish_reason="stop")
    batch = Rollouts(items=(old, said), version=6).to_batch()
    assert batch.staleness is not None
    assert batch.staleness[batch.staleness > 0].tolist() == [2]
    assert batch.staleness.tolist().index(2) == len(PROMPTS[0].token_ids)
    assert batch.response_mask.long().sum() == 5 and not batch.response_mask[-2]
    assert Rollouts(items=(said,), version=6).to_batch().staleness is None
    assert Rollouts(items=(said,), version=7).to_batch().staleness is not None


# --------------------------------------------------------------------------------------------------------- real ranks


def _in_parts(case: Case, parts: bool, family: str) -> list[tuple[list[int], list[float], tuple[tuple[int, int], ...]]]:
    """Responses with the weights as they are: at one go, or stopped whenever three groups are finished."""
    with actor_in(case, ARCHITECTURES[family]) as actor:
        actor.load(source_of(random_weights(ARCHITECTURES[family], 1)))
        hybrid = hybrid_of(actor, max_model_len=60)
        params = SamplingParams(max_tokens=30, stop_token_ids=tuple(range(0, 61, 12)))
        rollouts = begin_rollouts(PROMPTS, 2, seed=1, round_=1)
        rounds = 0
        with hybrid.phase():
            while any(rollout.finish_reason is None for rollout in rollouts):
                rounds += 1
                done = len({r.group for r in rollouts}) - len({r.group for r in rollouts if r.finish_reason is None})
                quota = Quota(groups=min(done + 3, 12)) if parts else None
                rollouts = list(hybrid.go_on(rollouts, params, version=rounds, quota=quota))
        hybrid.close()
        assert rounds > 2 if parts else rounds == 1
        return [(list(r.response.ids), list(r.response.logp), r.response.versions) for r in rollouts]


@pytest.mark.parametrize(
    ("case", "family"),
    [
        (Case(gen_tp=1), "qwen3"),
        (Case(tp=2, gen_tp=2), "qwen3"),
        (Case(dp=2, gen_tp=1), "qwen3"),
        (Case(tp=2, gen_tp=2, sequence_parallel=True), "deepseek_v3"),
        (Case(tp=2, gen_tp=2, sequence_parallel=True), "qwen3_next"),
    ],
    ids=str,
)
def test_stopping_at_a_quota_changes_no_response(ranks: Ranks, case: Case, family: str) -> None:
    whole = ranks.run(case.world, _in_parts, case, False, family)[0]
    parts = ranks.run(case.world, _in_parts, case, True, family)
    assert all(part == parts[0] for part in parts)
    for (tokens, logp, versions), (others, other_logp, _) in zip(parts[0], whole, strict=True):
        assert tokens == others and logp == pytest.approx(other_logp, abs=1e-5)
        assert sum(count for _, count in versions) == len(tokens)
    assert max(len(versions) for _, _, versions in parts[0]) > 1


CARRIED: dict[str, Any] = {
    "trainer__logger": ["jsonl"],
    "trainer__test_freq": 0,
    "trainer__val_before_train": False,
    "trainer__save_freq": 1,
    "trainer__total_training_steps": 6,
    "data__max_response_length": 20,
    "algorithm__rollout_correction": {"rollout_is": "token"},
    "actor_rollout_ref__actor__optim": {"lr": 1e-2},
    "actor_rollout_ref__rollout__stop_token_ids": [3],
    "actor_rollout_ref__rollout__carry_over": {"enable": True, "max_staleness": 2},
}


def _run(ranks: Ranks, folder: Path, world: int, *overrides: str, **sections: Any) -> None:
    if not folder.exists():
        folder.mkdir()
        (folder / "reward.py").write_text(FINGERPRINT)
        write_run(folder, **{**CARRIED, **sections})
    reward = f"reward.name={folder.parent / 'one' / 'reward.py'}:score"
    ended, said = ranks.run(world, run_here, str(folder / "run.yaml"), [reward, *overrides])[0]
    assert ended == "", said


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"global_step_{step}"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_repeats_itself_and_goes_on_with_unfinished_responses(ranks: Ranks, tmp_path: Path, world: int) -> None:
    for name in ("one", "two", "resumed"):
        _run(ranks, tmp_path / name, world)
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    rows = metrics_of(one)
    assert len(rows) == 6 and all(row["carry_over/groups"] == 16 for row in rows)
    assert rows[0].get("rollout/staleness_max") is None
    assert all(0 < row["rollout/staleness_mean"] < row["rollout/staleness_max"] <= 2 for row in rows[1:])
    assert max(row["carry_over/tokens"] for row in rows) > 16
    assert numbers_of(two) == numbers_of(one) and same(_checkpoint(two, 6), _checkpoint(one, 6))
    for step in (6, 5, 4):
        shutil.rmtree(_checkpoint(resumed, step))
    _run(ranks, resumed, world)
    assert numbers_of(resumed) == numbers_of(one) and same(_checkpoint(resumed, 6), _checkpoint(one, 6))


@pytest.mark.slow
def test_responses_under_way_lie_in_files_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """One of each replica; a checkpoint that lacks one, or has them in another form, is refused in one line."""
    _run(ranks, tmp_path / "one", 2, "trainer.total_training_steps=2")
    newest = _checkpoint(tmp_path / "one", 2)
    state = json.loads((newest / "trainer.json").read_text())
    assert state["carry_over"].keys() == {"next_group", "responses"}
    files, responses = ("carry_over.npz", "carry_over.00001.npz"), 0
    for file in files:
        with np.load(newest / file, allow_pickle=False) as stored:
            assert len(stored["token_ids"]) == len(stored["logp"]) == stored["length"].sum() > 16
            responses += len(stored["order"])
    assert responses == state["carry_over"]["responses"]
    assert set(files) < json.loads((newest / "manifest.json").read_text())["files"].keys()
    before = metrics_of(tmp_path / "one")
    config = str(tmp_path / "one" / "run.yaml")
    name = f"reward.name={tmp_path / 'one' / 'reward.py'}:score"
    (newest / files[1]).unlink()
    write_manifest(str(newest), record_files(str(newest), files_of(str(newest))))
    results = ranks.run(2, run_here, config, [name, "trainer.total_training_steps=3"])
    said = f"RunRefused: checkpoint '{newest}': the files of the responses under way do not belong together"
    assert {ended for ended, _ in results} == {f"{said}: some are missing or twice"}
    (newest / files[0]).unlink()
    write_manifest(str(newest), record_files(str(newest), files_of(str(newest))))
    results = ranks.run(2, run_here, config, [name, "trainer.total_training_steps=3"])
    said = f"RunRefused: checkpoint '{newest}': carry_over.npz cannot be read: [Errno 2] No such file or directory: "
    assert {ended for ended, _ in results} == {f"{said}'{newest}/carry_over.npz'"}
    np.savez_compressed(newest / "carry_over.npz", token_ids=np.zeros(1 << 28, np.int32))
    write_manifest(str(newest), record_files(str(newest), files_of(str(newest))))
    results = ranks.run(2, run_here, config, [name, "trainer.total_training_steps=3"])
    said = f"RunRefused: checkpoint '{newest}': carry_over.npz cannot be read: it is compressed"
    assert {ended for ended, _ in results} == {said}
    assert metrics_of(tmp_path / "one") == before


def test_a_checkpoint_with_responses_under_way_is_of_another_algorithm(ranks: Ranks, tmp_path: Path) -> None:
    _run(ranks, tmp_path / "one", 1, "trainer.total_training_steps=2")
    overrides = ["trainer.total_training_steps=3", "actor_rollout_ref.rollout.carry_over.enable=false"]
    ended, _ = ranks.run(1, run_here, str(tmp_path / "one" / "run.yaml"), overrides)[0]
    assert "another algorithm (rollout.carry_over 32 -> 0)" in ended
    _run(ranks, tmp_path / "one", 1, *overrides, "trainer.resume_allow=[algorithm]")
    last = metrics_of(tmp_path / "one")[-1]
    assert "carry_over/groups" not in last and "rollout/staleness_max" not in last


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"algorithm__rollout_correction": {}},
            "rollout.carry_over trains on tokens that older weights have drawn; set ",
        ),
        (
            {"actor_rollout_ref__rollout__carry_over": {"enable": True, "groups": 16}},
            "rollout.carry_over.groups = 16 must be more than data.train_batch_size = 16 and at most twice as many",
        ),
        (
            {"actor_rollout_ref__rollout__carry_over": {"enable": True, "groups": 33}},
            "rollout.carry_over.groups = 33 must be more than data.train_batch_size = 16 and at most twice as many",
        ),
        (
            {"algorithm__filter_groups": {"enable": True}},
            "algorithm.filter_groups draws prompts until enough groups diff",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_ranks_start(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    config = load_config(str(write_run(tmp_path, **{**CARRIED, **sections})))
    with pytest.raises(ValueError) as refused:
        check_run(config)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_too_many_old_responses_cannot_fill_a_batch() -> None:
    """Of groups that must be finished no replica has more than its share, however many replicas there are."""
    rng = random.Random(0)
    for _ in range(200):
        batch, replicas = rng.randrange(1, 20), rng.randrange(1, 9)
        quota = Quota(groups=batch)
        required = rng.randrange(batch + 1)
        shares = [quota.share(r, replicas) for r in range(replicas)]
        assert sum(shares) == batch
        assert all(len(range(r, required, replicas)) <= share for r, share in enumerate(shares))
    assert torch.tensor(shares).max() - torch.tensor(shares).min() <= 1

"""The order of prompts: shares of several files, and orders of one's own; bit-equal where a run goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from run_cases import run_here
from tiny_run import write_run

from megarl.config import load_config
from megarl.data.curriculum import as_asked, easy_first
from megarl.data.mixture import MixtureSampler
from megarl.data.prompt_sampler import PromptSampler
from megarl.trainer.admission.checks import check_run
from megarl.trainer.build import prompt_sampler

QUIET: dict[str, Any] = {"trainer__val_before_train": False, "trainer__test_freq": 0, "trainer__logger": ["jsonl"]}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_usual_order_is_what_it_was() -> None:
    """Drawn before there were weights or curricula."""
    sampler = PromptSampler(10, 4, True, 7)
    assert [sampler.next() for _ in range(3)] == [
        np.random.default_rng([7, epoch]).permutation(10)[start : start + 4].tolist()
        for epoch, start in ((0, 0), (0, 4), (1, 0))
    ]


def test_every_file_has_its_share_at_any_time() -> None:
    sizes, weights = [10, 40, 3], [1.0, 2.0, 1.0]
    sampler = MixtureSampler(sizes, weights, 5, True, 7)
    drawn: list[int] = []
    for _ in range(200):
        drawn += sampler.next()
        counts = np.bincount(np.searchsorted([10, 50, 53], drawn, side="right"), minlength=3)
        assert np.abs(counts - len(drawn) * np.array([0.25, 0.5, 0.25])).max() < 1
    for first, size in ((0, 10), (10, 40), (50, 3)):
        own = [i for i in drawn if first <= i < first + size]
        for start in range(0, len(own) - size, size):  # none a second time before all came once
            assert sorted(own[start : start + size]) == list(range(first, first + size))
    orders = [tuple(i for i in drawn if i < 10)[start : start + 10] for start in (0, 10, 20)]
    assert len(set(orders)) == 3
    plain = MixtureSampler([2, 2], [3, 1], 4, False, 7)
    assert [plain.next(), plain.next()] == [[0, 1, 2, 0], [1, 0, 3, 1]]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6), st.booleans(), st.integers(0, 30), st.data()
)
def test_a_mixture_goes_on_as_it_was(sizes: list[int], size: int, shuffle: bool, drawn: int, data: Any) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)))
    size = min(size, sum(sizes))
    first, second = (MixtureSampler(sizes, weights, size, shuffle, 3) for _ in range(2))
    for _ in range(drawn):
        first.next()
    second.load_state(json.loads(json.dumps(first.state())))
    assert [second.next() for _ in range(10)] == [first.next() for _ in range(10)]
    assert second.state() == first.state()


def test_a_mixture_that_is_another() -> None:
    state = MixtureSampler([4, 6], [1, 2], 2, True, 7).state()
    for other in (MixtureSampler([4, 6], [1, 3], 2, True, 7), MixtureSampler([5, 5], [1, 2], 2, True, 7)):
        assert "set trainer.resume_allow=[data]" in refusal(lambda other=other: other.load_state(state))  # type: ignore[misc]
    allowed = MixtureSampler([4, 6], [1, 3], 2, True, 7, allow=["data"])
    allowed.load_state(state)
    assert allowed.state()["epoch"] == 0
    assert "data.weights" in refusal(
        lambda: MixtureSampler([4, 6], [1, 2], 2, True, 7).load_state(PromptSampler(10, 2, True, 7).state())
    )
    assert "data.seed = 7, now it is 8" in refusal(lambda: MixtureSampler([4, 6], [1, 2], 2, True, 8).load_state(state))


def test_other_weights_draw_no_row_twice() -> None:
    """Every file goes on where it stood, with its new share from now on."""
    begun, allowed = (
        MixtureSampler([4, 12], [1, 1], 4, True, 7),
        MixtureSampler([4, 12], [1, 3], 4, True, 7, allow=["data"]),
    )
    before = [i for _ in range(3) for i in begun.next()]
    allowed.load_state(json.loads(json.dumps(begun.state())))
    after = [i for _ in range(2) for i in allowed.next()]
    assert Counter(i < 4 for i in before) == {True: 6, False: 6} and Counter(i < 4 for i in after) == {
        True: 2,
        False: 6,
    }
    assert len({i for i in (*before, *after) if i >= 4}) == 12  # all of the second file, and each once
    assert sorted(i for i in (*before[8:], *after) if i < 4) == [0, 1, 2, 3]  # the first file's second epoch


@pytest.mark.parametrize("now", [([5, 12], 7), ([4, 6, 6], 7), ([4, 12], 8)])
def test_files_in_another_order_begin_an_epoch_that_is_new(now: tuple[list[int], int]) -> None:
    sizes, seed = now
    begun = MixtureSampler([4, 12], [1, 1], 4, True, 7)
    for _ in range(3):  # the first file is in its second epoch
        begun.next()
    other = MixtureSampler(sizes, [1] * len(sizes), 4, True, seed, allow=["data", "seed"])
    other.load_state(json.loads(json.dumps(begun.state())))
    epochs = [2, 1] if seed == 8 else [2] * len(sizes)
    assert [(file["epoch"], file["position"]) for file in other.state()["files"]] == [(epoch, 0) for epoch in epochs]


def test_easy_rows_first() -> None:
    difficulty = np.array([3.0, 1.0, 2.0, 1.0, 3.0, 1.0])
    sampler = PromptSampler(6, 2, True, 7, order=easy_first(difficulty))
    epochs = [[i for _ in range(3) for i in sampler.next()] for _ in range(4)]
    assert all(difficulty[epoch].tolist() == sorted(difficulty) for epoch in epochs)
    assert len({tuple(epoch[:3]) for epoch in epochs}) > 1  # what is equally hard is shuffled
    going_on = PromptSampler(6, 2, True, 7, order=easy_first(difficulty))
    going_on.next()
    other = PromptSampler(6, 2, True, 7, order=easy_first(difficulty))
    other.load_state(json.loads(json.dumps(going_on.state())))
    assert [other.next() for _ in range(7)] == [going_on.next() for _ in range(7)]


def test_an_order_of_ones_own(tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "def order(epoch, rows):\n"
        "    return sorted(range(len(rows)), key=lambda i: rows[i]['id'] * (-1) ** epoch)\n"
        "def short(epoch, rows): return [0]\n"
        "def twice(epoch, rows): return [0] * len(rows)\n"
        "def fails(epoch, rows): return rows[len(rows)]['id']\n"
        "def leaves(epoch, rows): raise SystemExit(0)\n"
    )
    config = str(write_run(tmp_path))
    inputs = check_run(load_config(config, [f"data.curriculum={code}:order"]))
    sampler = prompt_sampler(inputs)
    assert [sampler.next() for _ in range(5)] == [list(range(i, i + 16)) for i in range(0, 80, 16)]
    assert sampler.next() == list(range(79, 63, -1))
    rows: list[dict[str, Any]] = [{"id": i} for i in range(5)]
    for name, said in (
        ("short", "must give every position from 0 to 4 once for epoch 0"),
        ("twice", "must give every position from 0 to 4 once for epoch 0"),
        ("fails", "failed for epoch 0: IndexError: list index out of range"),
        ("leaves", "failed for epoch 0: SystemExit: 0"),
    ):
        message = refusal(lambda name=name: as_asked(f"{code}:{name}", rows)(0, np.arange(5)))  # type: ignore[misc]
        assert message.endswith(said)
    assert "data.curriculum: no file at" in refusal(lambda: check_run(load_config(config, ["data.curriculum=no.py:f"])))
    said = refusal(lambda: check_run(load_config(config, ["data.curriculum=answer"])))
    assert said.startswith(f"{tmp_path}/train.jsonl:1: data.curriculum sorts by column 'answer', whose '")
    easy = prompt_sampler(check_run(load_config(config, ["data.curriculum=id", "data.shuffle=false"])))
    assert easy.next() == list(range(16))


def test_keys_that_do_not_go_together(tmp_path: Path) -> None:
    config, file = str(write_run(tmp_path)), f"{tmp_path}/train.jsonl"
    for overrides, said in (
        (["data.weights=[1,2]"], "data.weights has 2 numbers for 1 entries of data.train_files"),
        (["data.weights=[1]", "data.curriculum=id"], "data.curriculum orders all rows, data.weights draws from each"),
        (["data.weights=[0]"], "data.weights.0: input should be greater than 0"),
        ([f"data.train_files=[{file},{file}]", "data.weights=[1,1]"], "entry 2 of data.train_files has no rows of its"),
        (["trainer.flow=sft", "data.drop_duplicates=true"], "data.drop_duplicates is for prompts, and trainer.flow"),
        (["data.source=x.py:f"], "data.source and data.train_files both name the training rows"),
        (["data.train_files=[]", "data.source=x.py:f"], "data.source: no file at 'x.py'"),
        (["data.train_files=[]"], "data.train_files is empty"),
    ):
        message = refusal(lambda o=overrides: prompt_sampler(check_run(load_config(config, o))))  # type: ignore[misc]
        assert said in message, message


@pytest.mark.slow
def test_a_run_with_weights_goes_on_with_the_same_rows(ranks: Ranks, tmp_path: Path) -> None:
    """Two files of different sizes: three steps, and three steps with a stop in between."""
    rows = [json.dumps({"prompt": f"{i}+1+1=", "answer": str(i + 2)}) for i in range(9)]
    (tmp_path / "more.jsonl").write_text("\n".join(rows))
    keys = {**QUIET, "data__weights": [3, 1], "trainer__save_freq": 1, "trainer__total_training_steps": 3}
    keys |= {"trainer__log_rollouts": 64}
    config = write_run(tmp_path, **keys)
    files = f"data.train_files=[{tmp_path}/train.jsonl,{tmp_path}/more.jsonl]"
    assert ranks.run(1, run_here, str(config), [files])[0][0] == ""
    whole = _drawn(tmp_path)
    assert Counter(len(prompt) > 4 for prompt in whole[0]) == {False: 12, True: 4} and len(whole) == 3
    again = [files, f"trainer.default_local_dir={tmp_path}/again"]
    assert ranks.run(1, run_here, str(config), [*again, "trainer.total_training_steps=1"])[0][0] == ""
    assert ranks.run(1, run_here, str(config), again)[0][0] == ""
    assert _drawn(tmp_path, "again") == whole
    ended, _ = ranks.run(1, run_here, str(config), [*again, "data.weights=[1,1]", "trainer.total_training_steps=4"])[0]
    assert "another data (data.weights [3.0, 1.0] -> [1.0, 1.0])" in ended


def _drawn(folder: Path, run: str = "run") -> list[list[str]]:
    """The prompts of each step."""
    files = sorted((folder / run / "rollouts").glob("*.jsonl"))
    return [[json.loads(line)["prompt"] for line in path.read_text().splitlines()[::4]] for path in files]

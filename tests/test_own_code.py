"""What users' code returns is checked where it is called, and torch is afterwards as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import metrics_of, numbers_of, write_run
from training_cases import fixed_batch

import megarl
from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.loss import LossInput, LossOutput, Metric, Sum
from megarl.algorithms.registry import ESTIMATORS
from megarl.checkpoint.folder import read_state
from megarl.config import load_config
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.reward import RewardConfig
from megarl.registry import Registry
from megarl.rewards.in_rank import InRank
from megarl.rewards.parts import Part
from megarl.rewards.registry import Reward
from megarl.rewards.results import Response, Scored
from megarl.trainer.admission.checks import check_run
from megarl.types import Batch, Prompt


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ESTIMATORS, "_registered", dict(ESTIMATORS._registered))
    yield
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def _estimated(estimator: Any) -> torch.Tensor:
    batch = fixed_batch()
    ESTIMATORS.add("mine", estimator)
    scored = batch.with_(rewards=torch.ones(len(batch)))
    advantages = compute_advantages(scored, AlgorithmConfig(adv_estimator="mine"), 0.0).advantages
    assert advantages is not None
    return advantages


@pytest.mark.parametrize(
    ("returned", "form"),
    [
        (lambda batch: None, "NoneType"),
        (lambda batch: batch.rewards, r"a tensor \[\d+\]"),
        (lambda batch: torch.ones(len(batch.tokens) + 1), r"a tensor \[\d+\]"),
        (lambda batch: torch.ones(len(batch.tokens), 1), r"a tensor \[\d+, 1\]"),
        (lambda batch: [0.0] * len(batch.tokens), "list"),
        (lambda batch: batch, "NoneType"),
    ],
)
def test_an_estimator_that_returns_something_else_is_named(returned: Any, form: str) -> None:
    with pytest.raises(ValueError, match=rf"adv_estimator = mine must return a tensor \[\d+\], .* it returned {form}$"):
        _estimated(lambda batch, config: returned(batch))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_advantages_of_any_type_are_taken(dtype: torch.dtype) -> None:
    def ones(batch: Batch, config: AlgorithmConfig) -> torch.Tensor:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return torch.ones(len(batch.tokens), dtype=dtype)

    def with_gradient(batch: Batch, config: AlgorithmConfig) -> torch.Tensor:
        return torch.ones(len(batch.tokens), requires_grad=True)

    expected = fixed_batch().response_mask.float()
    for advantages in (_estimated(ones), _estimated(with_gradient)):
        assert torch.equal(advantages, expected) and not advantages.requires_grad


def _loss_of(out: Any) -> LossOutput:
    def mine(x: LossInput) -> Any:
        return out

    return Sum(mine)(LossInput(output=torch.ones(2, requires_grad=True), weights=torch.ones(2)))


def test_a_loss_that_returns_something_else_is_named() -> None:
    trained = torch.ones((), requires_grad=True)
    wrong = [
        None,
        torch.ones(()),
        LossOutput(loss=torch.ones(2)),
        LossOutput(loss=1.0),  # type: ignore[arg-type]
        LossOutput(loss=trained, metrics={"mine": 1.0}),  # type: ignore[dict-item]
        LossOutput(loss=trained, metrics={"mine": Metric(value=torch.ones(2))}),
        LossOutput(loss=trained, metrics=[]),  # type: ignore[arg-type]
    ]
    for out in wrong:
        with pytest.raises(
            ValueError, match=r"^the loss _loss_of\.<locals>\.mine must return a LossOutput of a scalar"
        ):
            _loss_of(out)
    for loss, wanted in (
        (trained.detach(), r"mine returned a loss without gradient; compute it from x\.output, without"),
        (trained.to("meta"), r"mine returned a loss on meta; compute it from x\.output, on cpu$"),
    ):
        with pytest.raises(ValueError, match=wanted):
            _loss_of(LossOutput(loss=loss))
    right = LossOutput(loss=trained, metrics={"mine": Metric(value=torch.ones(()))})
    assert _loss_of(right).loss == 1


PREFERENCES = """
import megarl, torch
def of(out):
    def mine(x):
        torch.set_grad_enabled(False)
        return out(x)
    mine.scope = "pair"
    return lambda preference: mine
number, detached = of(lambda x: 0.5), of(lambda x: megarl.LossOutput(loss=x.output.sum().detach()))
none = lambda preference: None
"""


def test_a_preference_loss_that_returns_something_else_is_named(ranks: Ranks, tmp_path: Path) -> None:
    config = str(write_run(tmp_path, trainer__flow="preference", trainer__val_before_train=False))
    for name in ("train", "val"):
        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 16
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(PREFERENCES)
    for name, wanted in {
        "number": "the loss of.<locals>.mine must return a LossOutput of a scalar tensor and of Metrics, not 0.5",
        "detached": "the loss of.<locals>.mine returned a loss without gradient; compute it from x.output",
        "none": f"what algorithm.preference.loss_mode = {tmp_path}/mine.py:none returns is no function",
    }.items():
        run_dir = f"trainer.default_local_dir={tmp_path / name}"
        words = [f"algorithm.preference.loss_mode={tmp_path}/mine.py:{name}", run_dir]
        ended, said = ranks.run(1, run_here, config, words)[0]
        assert ended.startswith(f"refused: {wanted}"), ended + said


STAGES = """
import os
import megarl, torch
def flow_of(stage):
    def flow(run):
        def mine(batch):
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            return stage(batch)
        megarl.ppo(run, mine)
    return flow
none = flow_of(lambda batch: None)
one_less = flow_of(lambda batch: batch.with_(rewards=batch.rewards[1:]))
number = flow_of(lambda batch: batch.with_(rewards=1.0))
without = flow_of(lambda batch: batch.with_(rewards=None))
others = flow_of(lambda batch: megarl.batch_of([[3]], [[4]], [0]))
unlike = flow_of(lambda batch: batch.with_(old_logp=batch.old_logp + os.getpid()))
right = flow_of(lambda batch: batch.with_(rewards=batch.rewards.double() * batch.old_logp.isfinite().all()))
def random(batch, config):
    return torch.full((len(batch.tokens),), float(os.getpid()))
@megarl.about("the mean over a rank's own sequences", sharded=True)
def own(batch, config):
    return batch.spread(batch.rewards - batch.own.float().mean())
@megarl.about("the mean over all sequences", sharded=True)
def every(batch, config):
    return batch.spread(batch.rewards - batch.rewards.mean())
"""
RETURNS = r"the stage flow_of.<locals>.flow.<locals>.mine must return the batch that it is given, with columns .*; "
UNLIKE = "returned other values on rank 1 than on rank 0: they must be the same on every rank"


@pytest.mark.parametrize(
    ("name", "wanted"),
    quick(
        [
            ("none", rf"{RETURNS}it returned NoneType$"),
            ("one_less", rf"{RETURNS}its rewards must be a tensor \[64\], not a tensor \[63\]$"),
            ("number", rf"{RETURNS}its rewards must be a tensor \[64\], not float$"),
            ("without", rf"{RETURNS}it returned one without rewards$"),
            ("others", rf"{RETURNS}it returned 1 other sequences for 64$"),
            ("unlike", rf"the stage flow_of.<locals>.flow.<locals>.mine {UNLIKE}"),
            ("random", rf"algorithm.adv_estimator = .*mine.py:random {UNLIKE}"),
            (
                "own",
                "algorithm.adv_estimator = .*mine.py:own is declared with sharded=True and gives other advantages for",
            ),
            ("every", "$"),
            ("right", "$"),
        ],
        1,
        6,
        8,
        9,
    ),
)
def test_a_stage_and_an_estimator_on_two_ranks(ranks: Ranks, tmp_path: Path, name: str, wanted: str) -> None:
    """On both ranks the same line; numbers of another type are taken, and torch is afterwards as it was. A stage gets
    log-probabilities though the batch has one optimizer step."""
    (tmp_path / "mine.py").write_text(STAGES)
    key = "algorithm.adv_estimator" if name in ("random", "own", "every") else "trainer.flow"
    config = write_run(tmp_path, trainer__total_training_steps=1, trainer__val_before_train=False)
    words = [f"{key}={tmp_path}/mine.py:{name}", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    for ended, said in ranks.run(2, run_here, str(config), words):
        assert re.match(wanted, ended.removeprefix("refused: ")), ended + said


def test_an_order_that_is_each_rank_s_own_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """From the second epoch on: the steps of the first are saved."""
    (tmp_path / "mine.py").write_text(
        "import os\nfrom random import Random\ndef order(epoch, rows):\n"
        "    return Random(epoch * os.getpid()).sample(range(len(rows)), len(rows))\n"
    )
    keys = {"trainer__save_freq": -1, "trainer__total_training_steps": 6, "trainer__val_before_train": False}
    config = str(write_run(tmp_path, **keys, data__curriculum=f"{tmp_path}/mine.py:order"))
    for ended, _ in ranks.run(2, run_here, config):
        assert ended == (
            f"refused: data.curriculum = {tmp_path}/mine.py:order gives rank 1 other prompts than rank 0: it must give "
            "the same on every rank"
        )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*")] == ["global_step_5"]


def leaves_rank_1(loop: str, step: int, row: Any) -> None:
    if step == 2 and torch.distributed.get_rank() == 1:
        raise SystemExit("enough")


@pytest.mark.slow
def test_a_callback_that_fails_loses_no_step(ranks: Ranks, tmp_path: Path) -> None:
    """It fails on one rank: all end with its line, and the run goes on from the step, whose validation is known."""
    keys = {"trainer__save_freq": -1, "trainer__test_freq": 2, "trainer__total_training_steps": 3}
    for name in ("whole", "left"):
        (tmp_path / name).mkdir()
        config = str(write_run(tmp_path / name, **keys, trainer__best_metric="val/accuracy"))
        if name == "left":
            results = ranks.run(2, run_here, config, [], "", "", [leaves_rank_1])
            assert "global_step_2; the same command goes on from it" in results[0][1]
            for ended, _ in results:
                assert ended == "refused: the callback leaves_rank_1 failed at step 2: SystemExit: enough"
            (saved,) = (tmp_path / name / "run" / "checkpoints").glob("*step*")
            assert saved.name == "global_step_2" and metrics_of(tmp_path / name)[-1]["step"] == 2
            assert "val/accuracy" in read_state(str(saved))["validation"]
        ended, said = ranks.run(2, run_here, config)[0]
        assert ended == "", said
    assert numbers_of(tmp_path / "whole") == numbers_of(tmp_path / "left")


def test_an_async_def_that_nothing_awaits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def mine(*args): pass\n")
    config = str(write_run(tmp_path))
    for key in ("algorithm.adv_estimator", "data.filter", "data.curriculum"):
        with pytest.raises(ValueError, match=rf"^{key} = .*mine\.py:mine is an async def, which nothing would await"):
            check_run(load_config(config, [f"{key}={tmp_path}/mine.py:mine"]))

    async def tell(*args: Any) -> None: ...

    with pytest.raises(ValueError, match=r"^the callback .*tell is an async def, which nothing would await: make"):
        megarl.train(config, callbacks=[tell])
    with pytest.raises(ValueError, match=r"^trainer\.flow = .*tell is an async def, which nothing would await: make"):
        megarl.train(config, flow=tell)
    assert not (tmp_path / "run").exists()


def test_a_row_that_a_closure_changes_is_whole_for_the_next_response() -> None:
    def score(response: str, row: Any) -> float:
        torch.set_grad_enabled(False)
        row["seen"].append(response)
        return float(len(row["seen"]))

    here = InRank(Part(reward=Reward(name="mine", function=score)), RewardConfig())
    prompt = Prompt(index=0, token_ids=(1,), row={"seen": []})
    for key in range(3):
        here.submit(key, Response(text="4"), prompt)
    results = here.collect().values()
    assert [one.score for one in results if isinstance(one, Scored)] == [1.0] * 3 and prompt.row == {"seen": []}


def test_a_file_that_changes_torch_as_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.bfloat16)\ndef f(): pass\n"
    )
    registry: Registry[Any] = Registry("some.key", "function")
    assert registry.load(f"{tmp_path / 'mine.py'}:f")() is None

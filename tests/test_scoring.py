"""Scores that are none, rewards that fail or hang, and what the run does about them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from tiny_run import metrics_of, train, train_in, write_run

from megarl.config import build_config, load_config
from megarl.config.reward import RewardConfig
from megarl.flow_kinds import FLOWS
from megarl.parallel.world import World
from megarl.rewards.in_rank import InRank
from megarl.rewards.parts import Part
from megarl.rewards.registry import Reward, load_reward
from megarl.rewards.results import Failure, Response, RewardError, Scored
from megarl.trainer.admission.checks import check_run
from megarl.trainer.records.step_metrics import reward_metrics
from megarl.trainer.resuming.identity import Identity, differences, identity_of
from megarl.trainer.scoring.scorer import Scorer
from megarl.types import Prompt, Rollout, Rollouts, Tokens
from megarl.workers.deadline import DeadlinePassed, call_within

PROMPT = Prompt(index=3, token_ids=(1, 2), row={"answer": "4"}, source="train.jsonl:17")


def returning(value: object) -> Reward:
    return Reward(name="mine.py:f", function=lambda response, row: value)  # type: ignore[return-value, arg-type]


def judge(reward: Reward, response: str, prompt: Prompt, *, timeout: float) -> float | Failure:
    """One response, in this process."""
    here = InRank(Part(reward=reward), RewardConfig(timeout=timeout))
    here.submit("it", Response(text=response), prompt)
    result = here.collect()["it"]
    return result.score if isinstance(result, Scored) else result


# ------------------------------------------------------------------------------------------------------- one score


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, ValueError])
def test_what_a_function_lets_out_is_its_own_failure(error: type[BaseException]) -> None:
    def score(response: str, row: Any) -> float:
        raise error

    result = judge(Reward(name="mine.py:f", function=score), "4", PROMPT, timeout=300)
    assert isinstance(result, Failure) and error.__name__ in result.reason


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0), torch.tensor(True)]
)
def test_numbers_are_scores(value: object) -> None:
    result = judge(returning(value), "4", PROMPT, timeout=300)
    assert result == 1.0 and type(result) is float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "returned nan, which is not finite"),
        (float("-inf"), "returned -inf, which is not finite"),
        (np.float32("inf"), "returned inf, which is not finite"),
        (1e39, "returned 1e+39, which is too large for float32"),
        (10**400, "returned a number that is too large for float32"),
        (None, "returned None, a NoneType, and not one number"),
        ("1.0", "returned '1.0', a str, and not one number"),
        ((1.0, "good"), "returned (1.0, 'good'), a tuple, and not one number"),
        (torch.ones(1), "returned tensor([1.]), a Tensor, and not one number"),
        (1j, "returned 1j, a complex, and not one number"),
    ],
)
def test_what_is_no_score_names_reward_row_and_response(value: object, said: str) -> None:
    assert judge(returning(value), "4\n", PROMPT, timeout=300) == Failure(
        reason=f"reward.name = mine.py:f {said}; row train.jsonl:17, response '4\\n'"
    )


def test_the_users_exception_comes_with_the_users_frames(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys\n\ndef inner(x):\n    raise KeyError(f'no\\n{x}')\n\n\ndef key(response, row):\n"
        "    return inner(row['answer'])\n\n\ndef leave(response, row):\n    sys.exit(3)\n\n\n"
        "def wrong(response):\n    return 1.0\n\n\ndef deep(response, row):\n    return deep(response, row)\n"
    )
    failure = judge(load_reward(f"{file}:key"), "x" * 1000, PROMPT, timeout=300)
    said = re.sub(r"\n +\^+\n", "\n", str(failure))  # which Python 3.10 does not underline
    assert said == (
        f"reward.name = {file}:key raised KeyError: 'no\\n4'; row train.jsonl:17, response '{'x' * 199}...\n"
        f"  File \"{file}\", line 8, in key\n    return inner(row['answer'])\n"
        f"  File \"{file}\", line 4, in inner\n    raise KeyError(f'no\\n{{x}}')"
    )
    told = {
        name: str(judge(load_reward(f"{file}:{name}"), "", PROMPT, timeout=300)) for name in ("leave", "wrong", "deep")
    }
    assert "raised SystemExit: 3; row train.jsonl:17, response ''\n" in told["leave"]
    assert "raised TypeError: wrong() takes 1 positional argument but 2 were given; row" in told["wrong"]
    assert "raised RecursionError" in told["deep"] and len(told["deep"]) < 4000


# ---------------------------------------------------------------------------------------------------- the deadline

HANGS = """
import re, time

def loops(response, row):
    while True:
        pass

def sleeps(response, row):
    time.sleep(9999)

def backtracks(response, row):
    return float(re.fullmatch("(a|aa)+b", "a" * 60) is not None)

def holds_on(response, row):
    for _ in range(3):
        try:
            time.sleep(9999)
        except BaseException:
            pass
    return 1.0
"""


@pytest.mark.parametrize("name", ["loops", "sleeps", "backtracks", "holds_on"])
def test_a_reward_that_hangs_is_stopped(tmp_path: Path, name: str) -> None:
    file = tmp_path / "slow.py"
    file.write_text(HANGS)
    handler = signal.getsignal(signal.SIGALRM)
    failure = judge(load_reward(f"{file}:{name}"), "4", PROMPT, timeout=0.1)
    assert isinstance(failure, Failure)
    assert failure.reason == (
        f"reward.name = {file}:{name} took longer than reward.timeout = 0.1 s; row train.jsonl:17, response '4'"
    )
    # code that caught the exception has come to its end: there are no frames of it
    assert failure.frames == "" if name == "holds_on" else 'slow.py", line' in failure.frames
    assert signal.getsignal(signal.SIGALRM) == handler


def test_the_deadline_leaves_nothing_behind() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert call_within(300, lambda: 3) == 3
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 1000  # somebody else's alarm goes on
        with pytest.raises(DeadlinePassed):
            call_within(0.05, lambda: time.sleep(9999))
        with pytest.raises(ZeroDivisionError):
            call_within(300, lambda: 1 / 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
    results = []
    thread = threading.Thread(target=lambda: results.append(call_within(0.05, lambda: time.sleep(0.2) or 7)))
    thread.start()
    thread.join()
    assert results == [7]  # no signal arrives in a thread


# ------------------------------------------------------------------------------------------------------- all ranks


def score_on_a_rank(function: str, on_error: str) -> tuple[Rollouts, list[str]] | str:
    """Two prompts, three samples each, whose texts are "0" to "5"; every rank scores three."""
    world = World()
    inputs: Any = SimpleNamespace(  # what scoring asks of a run's inputs
        config=build_config({"reward": {"on_error": on_error, "timeout": 1}, "trainer": {"n_gpus_per_node": 2}}),
        rewards=(Part(reward=Reward(name="mine.py:f", function=eval(function))),),
        tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(str, ids))),
    )
    prompts = [Prompt(index=i, token_ids=(7, 8), row={}, source=f"train.jsonl:{i + 1}") for i in range(2)]
    items = [
        Rollout(
            prompt=prompts[i // 3], group=i // 3, seed=i, response=Tokens().drawn([i], [-1.0]), finish_reason="stop"
        )
        for i in range(6)
    ]
    lines: list[str] = []
    try:
        scorer = Scorer(inputs, world, lines.append)
        return scorer(Rollouts(items=tuple(items))), lines
    except RewardError as e:
        return str(e)
    finally:
        world.leave()


def test_responses_without_a_score_take_no_part(ranks: Ranks) -> None:
    fails_at_2_and_4 = "lambda response, row: 1 / (int(response) - 4) if response != '2' else float('nan')"
    results = ranks.run(2, score_on_a_rank, fails_at_2_and_4, "drop")
    assert results[0] == results[1]
    rollouts, lines = results[0]
    assert rollouts.rewards == (-0.25, -1 / 3, None, -1.0, None, 1.0)
    assert lines == [
        "2 of 6 responses could not be scored; the first: reward.name = mine.py:f returned nan, which is not finite; "
        "row train.jsonl:1, response '2'"
    ]
    assert reward_metrics(rollouts) == {"mean": pytest.approx(-7 / 48), "accuracy": 0.25, "failed": 2.0}
    batch = rollouts.to_batch()
    assert batch.response_lengths.tolist() == [1, 1, 0, 1, 0, 1]
    assert batch.rewards is not None and batch.rewards.tolist() == pytest.approx([-0.25, -1 / 3, 0, -1, 0, 1])
    assert batch.rollout_logp is not None and batch.rollout_logp.view(6, 3)[:, 2].tolist() == [-1] * 6

    (first, second) = ranks.run(2, score_on_a_rank, "lambda response, row: None", "drop")
    assert first == second and re.match("none of 6 responses could be scored; the first: .* response '0'", first)


def test_a_failure_ends_the_run(ranks: Ranks) -> None:
    """On all ranks alike, so that they can save together: the first rank's."""
    said = ranks.run(2, score_on_a_rank, "lambda response, row: 1 / 0", "fail")
    for text in said:
        assert text.startswith(
            "reward.name = mine.py:f raised ZeroDivisionError: division by zero; row train.jsonl:1, response '0'\n"
        )
        assert text.endswith("\n(reward.on_error=drop leaves out the responses that cannot be scored)")


# ---------------------------------------------------------------------------------------------------------- a run

TWO = """
def digits(response, row, *, most):
    return {"score": min(most, sum(c.isdigit() for c in response)), "chars": len(response)}

async def right(response, row, *, tokens, finish_reason):
    assert tokens <= 4 and finish_reason in ("stop", "length")
    return response == row["answer"]
"""


def parts_in(folder: Path, **right: Any) -> dict[str, Any]:
    (folder / "two.py").write_text(TWO)
    return {
        "digits": {"name": f"{folder / 'two.py'}:digits", "weight": 0.25, "args": {"most": 2}},
        "right": {"name": f"{folder / 'two.py'}:right", **right},
    }


def with_sources(folder: Path) -> None:
    """Give the rows of a run data sources: even and odd ids."""
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        rows = [{**row, "kind": ("even", "odd")[row["id"] % 2]} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_scores_by_parts_and_leaves_no_process(tmp_path: Path, ranks: Ranks) -> None:
    config = write_run(
        tmp_path,
        reward={"parts": parts_in(tmp_path, data_sources=["even"]), "workers": 2, "on_error": "retry"},
        data__source_key="kind",
        trainer__total_training_steps=2,
        trainer__test_freq=1,
        trainer__logger=["jsonl"],
    )
    with_sources(tmp_path)
    before = ranks.run(1, children_of_this_process)
    train_in(ranks, 1, config)
    for row in metrics_of(tmp_path)[1:]:
        even, odd = row["reward/source/even/mean"], row["reward/source/odd/mean"]
        assert min(even, odd) <= row["reward/mean"] <= max(even, odd) and 0 <= row["reward/part/digits"] <= 2
        assert 0 <= row["reward/part/digits/chars"] <= 4 and 0 <= row["reward/part/right"] <= 1
        assert odd <= 0.5 and row["reward/source/odd/accuracy"] == 0.0 <= row["val/part/right"]
        assert row["reward/latency_max_s"] >= row["reward/latency_p95_s"] > 0 == row["reward/retried"]
        assert row["reward/failed"] == 0 and "val/latency_max_s" not in row
    assert ranks.run(1, children_of_this_process) == before


def test_a_run_that_fails_leaves_no_process(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "one.py").write_text("def f(response, row):\n    return 1 / 0\n")
    config = write_run(tmp_path, reward={"name": f"{tmp_path / 'one.py'}:f"}, trainer__logger=[])
    (said,) = ranks.launch(1, failing, str(config))
    assert said[0].startswith(f"reward.name = {tmp_path / 'one.py'}:f raised ZeroDivisionError: division by zero; row ")
    assert f'File "{tmp_path / "one.py"}", line 2, in f' in said[0] and said[1] == said[2]


def failing(config: str) -> tuple[str, list[str], list[str]]:
    """What it says, and this process' children before and after."""
    from megarl.parallel.train_groups import leave_world

    before = children_of_this_process()
    try:
        train(config, [])
    except RewardError as e:
        leave_world()
        return str(e), before, children_of_this_process()
    raise AssertionError("it does not fail")


def children_of_this_process() -> list[str]:
    """Each with its command, in which a failure names it; other tests may have left some."""
    pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()}" for pid in pids]


def test_rows_that_no_part_scores_are_refused(tmp_path: Path) -> None:
    parts = parts_in(tmp_path, data_sources=["even", "odder"])
    config = write_run(tmp_path, reward={"parts": parts}, data__source_key="kind")
    with_sources(tmp_path)
    with pytest.raises(ValueError, match=r"^reward\.parts\.right\.data_sources: no row has the data source 'odder'; "):
        check_run(load_config(str(config)))
    alone = load_config(str(config)).model_dump()
    alone["reward"]["parts"] = {"right": {**parts["right"], "data_sources": ["even"]}}
    said = r"train\.jsonl:\d+: the row has the data source 'odd', and no part of reward\.parts scores it$"
    with pytest.raises(ValueError, match=said):
        check_run(build_config(alone))
    alone["data"]["source_key"] = "kinds"
    with pytest.raises(ValueError, match="the row has the data source 'train', and no part of"):
        check_run(build_config(alone))
    alone["reward"]["parts"] = {"one": {"name": "exact_match"}, "two": {"name": "reasoning_gym"}}
    with pytest.raises(ValueError, match=r"train\.jsonl:1: reward reasoning_gym needs the columns data_source, "):
        check_run(build_config(alone))


def test_a_checkpoint_records_the_code_that_a_program_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(write_run(tmp_path))
    monkeypatch.setattr(FLOWS, "_registered", {})

    def given(reward: Any, flow: Any = lambda run: None) -> Identity:
        FLOWS.add("mine", flow)
        mine = Reward(name="mine", function=reward)
        return identity_of(check_run(load_config(config, ["trainer.flow=mine"]), reward=mine))

    first = given(lambda response, row: float(response in {"a", "b"}))
    assert differences(first, given(lambda response, row: float(response in {"b", "a"}))) == {}
    changed = given(lambda response, row: float(response not in {"a", "b"}), lambda run: run)
    assert differences(first, changed) == {"flow": "other code", "reward": "other code"}
    without = {part: {key: x for key, x in values.items() if key != "code"} for part, values in first.items()}
    assert differences(without, changed) == {}


def test_a_checkpoint_records_what_scores_are_made_of(tmp_path: Path) -> None:
    path = str(write_run(tmp_path))

    def identity(**reward: Any) -> Identity:
        tree = load_config(path).model_dump()
        tree["reward"] |= reward
        return identity_of(check_run(build_config(tree)))

    before = {"reward": {"reward.name": "exact_match", "file": None}}  # as in a checkpoint from before there were parts
    assert differences(before, identity(workers=7, timeout=3, on_error="retry", retries=2, concurrency=9)) == {}
    parts = parts_in(tmp_path)
    with_parts = identity(parts=parts)
    assert "reward.parts.digits.args.most null -> 2" in differences(before, with_parts)["reward"]
    heavier = identity(parts={**parts, "right": {**parts["right"], "weight": 2.0}})
    assert differences(with_parts, heavier) == {"reward": "reward.parts.right.weight 1.0 -> 2.0"}
    (tmp_path / "two.py").write_text(TWO + "\n")
    assert differences(with_parts, identity(parts=parts)) == {
        "reward": "other reward.parts.digits.file, other reward.parts.right.file"
    }

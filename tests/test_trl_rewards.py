"""Reward functions with TRL's signature: called as its GRPOTrainer calls them, or refused before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_data import message
from test_reward_pool import pool_of
from tiny_run import write_run

from megarl.config import Config, load_config
from megarl.rewards.call import check_arguments
from megarl.rewards.in_rank import InRank
from megarl.rewards.parts import Part
from megarl.rewards.registry import Reward, load_reward
from megarl.rewards.results import Failure, Response, Scored
from megarl.trainer.admission.checks import check_run
from megarl.types import Prompt

FUNCTIONS = '''
def right(completions, answer, **kwargs):
    return [float(completion == text) for completion, text in zip(completions, answer, strict=True)]

def length(completions, **kwargs):
    return [len(completion) / 100 for completion in completions]

def spoken(prompts, completions, solution, log_metric=None, log_extra=None):
    """Of conversations."""
    log_extra("solution", solution)
    log_metric("turns", len(prompts[0]))
    return [float(completion[0]["content"] == text) for completion, text in zip(completions, solution, strict=True)]

def sums(completions, kind, **kwargs):
    """Not applicable to other rows."""
    return [None if one != "sum" else 1.0 for one in kind]

async def asked(completions, answer, **kwargs):
    return [float(completion == text) for completion, text in zip(completions, answer, strict=True)]

def everything(completions, **kwargs):
    assert sorted(kwargs) == ["answer", "kind", "log_extra", "log_metric", "prompts", "solution"], kwargs
    return [len(completions)] * len(completions)

def stateful(completions, trainer_state):
    return [0.0] * len(completions)

def short(completions, **kwargs):
    return [0.0] * (len(completions) + 1)
'''
ROW = {"prompt": "2+2=", "answer": "4", "solution": "4", "kind": "sum"}


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


def score(
    file: str, name: str, *texts: str, row: dict[str, Any] = ROW, batch_size: int | None = None, **args: Any
) -> list[float | Failure]:
    """Of several responses to a row, in this process."""
    reward = load_reward(f"{file}:{name}")
    kind: Any = "batch" if batch_size else "async" if name == "asked" else "plain"
    settings = Config().reward.model_copy(update={"batch_size": batch_size, "on_error": "drop"})
    here = InRank(Part(reward=reward, kind=kind, args=args), settings)
    for place, text in enumerate(texts):
        here.submit(place, Response(text=text, prompt=row["prompt"]), Prompt(index=0, token_ids=(1,), row=row))
    return [one.score if isinstance(one, Scored) else one for one in here.collect().values()]


def test_columns_come_by_name(file: str) -> None:
    for batch_size in (None, 8):
        assert score(file, "right", "4", "5", batch_size=batch_size) == [1.0, 0.0]
        assert score(file, "length", "x" * 50, batch_size=batch_size) == [0.5]
    assert score(file, "asked", "4", "5") == [1.0, 0.0]
    assert score(file, "everything", "4", "5") == [1.0, 1.0]
    assert score(file, "everything", "4", "5", batch_size=8) == [2.0, 2.0]


def test_completions_of_a_conversation_are_messages(file: str) -> None:
    row = {**ROW, "prompt": [{"role": "user", "content": "2+2="}]}
    reward = load_reward(f"{file}:spoken")
    here = InRank(Part(reward=reward), Config().reward)
    here.submit(0, Response(text="4", prompt=row["prompt"]), Prompt(index=0, token_ids=(1,), row=row))
    result = here.collect()[0]
    assert isinstance(result, Scored) and (result.score, result.metrics) == (1.0, {"turns": 1.0})


def test_none_says_that_a_function_does_not_apply(file: str) -> None:
    """It counts for nothing in a sum; a response that no function applies to is left out, and is no failure."""
    other = {**ROW, "kind": "product"}
    (left_out,) = score(file, "sums", "4", row=other)
    assert isinstance(left_out, Failure) and left_out.left_out and "mine.py:sums returned None" in left_out.reason
    parts = {"sums": {"name": f"{file}:sums"}, "right": {"name": f"{file}:right", "weight": 2.0}}
    with pool_of(workers=1, parts=parts, on_error="fail") as pool:
        for key, row in enumerate((ROW, other)):
            pool.submit(key, Response(text="4", prompt="2+2="), Prompt(index=key, token_ids=(1,), row=row))
        found = [one for one in pool.collect().values() if isinstance(one, Scored)]
    assert [(one.score, one.parts) for one in found] == [(3.0, {"sums": 1.0, "right": 1.0}), (2.0, {"right": 1.0})]


def test_what_is_not_one_value_for_each(file: str) -> None:
    (wrong,) = score(file, "short", "4")
    assert "returned 2 scores for a list of 1 response, and not one for each" in str(wrong)


def test_refusals_before_the_start(file: str, tmp_path: Path) -> None:
    run = str(write_run(tmp_path))
    check_run(load_config(run, [f"reward.name={file}:right"]))
    said = message(lambda: check_run(load_config(run, [f"reward.name={file}:spoken"])))
    assert (
        f"train.jsonl:1: reward {file}:spoken is called as TRL does it, for its parameter completions, and takes "
        in said
    )
    assert "solution: no such column; the row has prompt, " in said
    said = message(lambda: check_run(load_config(run, [f"reward.name={file}:stateful"])))
    assert said == f"reward {file}:stateful takes TRL's trainer_state, which is not handed on; give it a default"
    check_run(load_config(run, [f"reward.name={file}:spoken", "reward.args.solution=[x]"]))
    said = message(lambda: check_arguments(load_reward(f"{file}:spoken"), {"scale": 2}, "reward.args"))
    assert "takes no argument 'scale'" in said


def test_a_function_that_a_program_gives(file: str) -> None:
    def mine(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(one == text) for one, text in zip(completions, answer, strict=True)]

    here = InRank(Part(reward=Reward(name="mine", function=mine)), Config().reward)
    here.submit(0, Response(text="4", prompt="2+2="), Prompt(index=0, token_ids=(1,), row=ROW))
    (result,) = here.collect().values()
    assert isinstance(result, Scored) and result.score == 1.0

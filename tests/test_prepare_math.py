"""Rows of mathematics data sets from small files of the published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megarl.rewards import load_reward
from tools.prepare_math import last_boxed, main


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def made(tmp_path: Path, dataset: str, *args: str) -> list[dict[str, Any]]:
    assert main([dataset, *args, "--out", f"{tmp_path}/out.jsonl"]) == 0
    rows, check = lines(tmp_path / "out.jsonl"), load_reward("exact_match").check_row
    assert check is not None
    for row in rows:
        check(row)
    return rows


def test_gsm8k(tmp_path: Path) -> None:
    row = {"question": "Ada has 1,000 …?", "answer": "2*500 = <<2*500=1000>>1000\n#### 1,000"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    template = "{problem}\nEnd with \\boxed{{}}."
    (found,) = made(tmp_path, "gsm8k", f"{tmp_path}/train.jsonl", "--template", template)
    assert found == {
        "prompt": "Ada has 1,000 …?\nEnd with \\boxed{}.",
        "answer": "1000",
        "data_source": "gsm8k",
        "solution": row["answer"],
    }


def test_math(tmp_path: Path) -> None:
    solution = "So $\\boxed{1}$? No: $\\boxed{\\frac{1}{\\sqrt{2}}}$."
    row = {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": solution}
    (tmp_path / "1.json").write_text(json.dumps(row))
    (tmp_path / "2.json").write_text(json.dumps([{**row, "problem": "Find $y$."}]))
    found = made(tmp_path, "math", f"{tmp_path}/1.json", f"{tmp_path}/2.json", "--chat")
    assert [row["prompt"] for row in found] == [[{"role": "user", "content": f"Find ${c}$."}] for c in "xy"]
    assert {(row["answer"], row["level"], row["data_source"]) for row in found} == {
        ("\\frac{1}{\\sqrt{2}}", "Level 5", "math")
    }


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("\\boxed 5.", "5"), ("\\fbox{a}", "a"), ("\\boxed{ {1}, {2} }", "{1}, {2}"), ("x \\boxed{}", "")],
)
def test_boxes(solution: str, answer: str) -> None:
    assert last_boxed(solution, "") == answer


def test_aime(tmp_path: Path) -> None:
    table = pa.table({"ID": ["2024-I-1"], "Problem": ["Find it."], "Answer": [33]})
    parquet.write_table(table, tmp_path / "aime.parquet")
    (found,) = made(tmp_path, "aime", f"{tmp_path}/aime.parquet")
    assert found == {"prompt": "Find it.", "answer": "33", "data_source": "aime", "id": "2024-I-1"}
    (tmp_path / "a.jsonl").write_text('{"question": "Q", "answer": "025"}\n')
    assert made(tmp_path, "aime", f"{tmp_path}/a.jsonl")[0]["answer"] == "25"


def test_dapo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row of the published file is there many times."""
    one = {
        "data_source": "math_dapo",
        "prompt": [{"content": "Solve.", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }
    parquet.write_table(pa.Table.from_pylist([one] * 100), tmp_path / "dapo.parquet", row_group_size=30)
    (found,) = made(tmp_path, "dapo", f"{tmp_path}/dapo.parquet")
    assert found == {"prompt": "Solve.", "answer": "34", "data_source": "math_dapo"}
    assert "1 rows; 99 repeat a prompt and were left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dataset", "row", "args", "said"),
    [
        ("gsm8k", '{"question": "q", "answer": "72"}', [], "rows.jsonl:1: the answer does not end with '#### NUMBER'"),
        ("gsm8k", '{"q": "q", "answer": "#### 72"}', [], ":1: column 'question' must hold text; columns: q, answer"),
        ("math", '{"problem": "p", "solution": "5"}', [], ":1: the solution has no \\boxed answer"),
        ("math", '{"problem": "p", "solution": "\\\\boxed{5"}', [], ":1: the solution's last \\boxed{ is not closed"),
        ("aime", '{"problem": "p", "answer": "1000"}', [], "must be a whole number from 0 to 999, not '1000'"),
        ("dapo", '{"prompt": "p"}', [], ":1: column 'prompt' must hold one message"),
        ("dapo", '{"prompt": [{"content": "p"}]}', [], ":1: column 'reward_model' must hold a ground_truth"),
        ("aime", "{", [], "rows.jsonl:1 is not JSON"),
        ("aime", '{"problem": "p", "answer": 1}', ["--template", "{x}"], "must hold {problem}, and no other braces"),
        ("aime", '{"problem": "p", "answer": 1}', ["--template", "x"], "must hold {problem}, and no other braces"),
    ],
)
def test_rows_of_another_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: str, row: str, args: list[str], said: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    (tmp_path / "out.jsonl").write_text("kept")
    assert main([dataset, f"{tmp_path}/rows.jsonl", "--out", f"{tmp_path}/out.jsonl", *args]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert (tmp_path / "out.jsonl").read_text() == "kept" and not (tmp_path / "out.jsonl.part").exists()

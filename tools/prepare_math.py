"""Make MegaRL's rows of mathematics data sets, from files in the form in which these are published.

    python tools/prepare_math.py gsm8k train.jsonl --out data/gsm8k_train.jsonl
    python tools/prepare_math.py math MATH/train/*/*.json --out data/math_train.jsonl
    python tools/prepare_math.py aime aime_2024.parquet --out data/aime_2024.jsonl
    python tools/prepare_math.py dapo dapo-math-17k.parquet --out data/dapo.jsonl

FILES are .jsonl, .json (one object, or a list of them) or .parquet:

    gsm8k   question, answer: a solution whose last line is "#### 72"
    math    problem, solution with the answer in its last \\boxed{...}; level, type or subject are kept
    aime    problem or question, and answer: a whole number from 0 to 999; any case of the columns' names
    dapo    prompt: messages, reward_model.ground_truth; data_source is kept. Rows that repeat a prompt are left out:
            the published file has each 100 times

The rows have the columns prompt, answer, data_source (the data set's name, but for dapo) and what is kept.
With --chat the prompt is a list of messages for the model's chat template; with --template it is put into a text, such
as '{problem}\\nPut your answer into \\boxed{{}}.'
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.data.files import data_files
from megarl.data.readers import Row, rows_of_file

Made = dict[str, Any]
NOTHING = "{problem}"


def main(argv: list[str] | None = None) -> int:
    """Exit code 2, and one line, for files that are not what they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", choices=sorted(DATASETS))
    parser.add_argument("files", nargs="+", metavar="FILES")
    parser.add_argument("--out", required=True, type=Path, help="the jsonl file to write")
    parser.add_argument("--template", default=NOTHING, help="text with {problem} in it; default {problem} alone")
    parser.add_argument("--chat", action="store_true", help="prompts are lists of messages")
    args = parser.parse_args(argv)
    try:
        seen, written = prepare(args.dataset, args.files, args.out, args.template, chat=args.chat)
    except (ValueError, OSError) as e:
        print(f"prepare_math: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    repeated = f"; {seen - written} repeat a prompt and were left out" if seen > written else ""
    print(f"{args.out}: {written} rows{repeated}")
    return 0


def prepare(dataset: str, files: list[str], out: Path, template: str, *, chat: bool) -> tuple[int, int]:
    """Write the rows, or nothing; returns how many there were, and how many were written.

    Raises:
        ValueError: a file that cannot be read, a row that is not of the data set's form, a template without {problem}.
    """
    try:
        if template.format(problem="@") == template.format(problem=""):
            raise KeyError("problem")
    except (KeyError, IndexError, ValueError) as e:
        raise ValueError(f"--template '{template}' must hold {{problem}}, and no other braces but {{{{ }}}}") from e
    seen, known = 0, set()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.part")
    try:
        with open(partial, "w", encoding="utf-8") as f:
            for source, columns in _rows(files):
                seen += 1
                made = DATASETS[dataset](columns, source)
                key = made["prompt"]
                if key in known:
                    continue
                known.add(key)
                text = template.format(problem=key)
                made["prompt"] = [{"role": "user", "content": text}] if chat else text
                f.write(json.dumps(made, ensure_ascii=False) + "\n")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return seen, len(known)


def _gsm8k(row: Mapping[str, Any], source: str) -> Made:
    solution = _text(row, "answer", source)
    _, sign, answer = solution.rpartition("####")
    if not sign or not answer.strip():
        raise ValueError(f"{source}: the answer does not end with '#### NUMBER'")
    return {
        "prompt": _text(row, "question", source),
        "answer": answer.strip().replace(",", ""),
        "data_source": "gsm8k",
        "solution": solution,
    }


def _math(row: Mapping[str, Any], source: str) -> Made:
    solution = _text(row, "solution", source)
    kept = {name: row[name] for name in ("level", "type", "subject") if name in row}
    return {
        "prompt": _text(row, "problem", source),
        "answer": last_boxed(solution, source),
        "data_source": "math",
        "solution": solution,
        **kept,
    }


def _aime(row: Mapping[str, Any], source: str) -> Made:
    lower = {name.lower(): value for name, value in row.items()}
    answer = str(lower.get("answer", "")).strip()
    if not re.fullmatch(r"0*\d{1,3}", answer):
        raise ValueError(f"{source}: the answer must be a whole number from 0 to 999, not '{answer[:40]}'")
    problem = "problem" if "problem" in lower else "question"
    kept = {name: lower[name] for name in ("id", "year") if name in lower}
    return {"prompt": _text(lower, problem, source), "answer": str(int(answer)), "data_source": "aime", **kept}


def _dapo(row: Mapping[str, Any], source: str) -> Made:
    messages, reward = row.get("prompt"), row.get("reward_model")
    if not (isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], dict)):
        raise ValueError(f"{source}: column 'prompt' must hold one message")
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise ValueError(f"{source}: column 'reward_model' must hold a ground_truth")
    return {
        "prompt": _text(messages[0], "content", source),
        "answer": str(reward["ground_truth"]),
        "data_source": str(row.get("data_source") or "dapo"),
    }


DATASETS: Mapping[str, Callable[[Mapping[str, Any], str], Made]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "aime": _aime,
    "dapo": _dapo,
}


def last_boxed(solution: str, source: str) -> str:
    """What the last \\boxed{...} (or \\fbox{...}, or \\boxed 5) of a text holds; raises ValueError if there is none."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        raise ValueError(f"{source}: the solution has no \\boxed answer")
    rest = solution[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.lstrip().startswith("{"):
        found = re.match(r"\s*([^\s$.,]+)", rest)
        if found is None:
            raise ValueError(f"{source}: the solution's last \\boxed is empty")
        return found[1]
    rest, depth = rest.lstrip(), 0
    for i, c in enumerate(rest):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return rest[1:i].strip()
    raise ValueError(f"{source}: the solution's last \\boxed{{ is not closed")


def _rows(files: list[str]) -> Iterator[Row]:
    for name in files:
        if name.endswith(".json"):
            yield from _of_json(name)
            continue
        for file in data_files([name], "FILES"):
            yield from rows_of_file(file, "FILES")


def _of_json(name: str) -> Iterator[Row]:
    try:
        with open(name, encoding="utf-8") as f:
            value = json.load(f)
    except ValueError as e:
        raise ValueError(f"{name} is not JSON: {e}") from e
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{name}: row {number} must be an object of columns, not {type(row).__name__}")
        yield Row(f"{name} row {number}", row)


def _text(row: Mapping[str, Any], key: str, source: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{source}: column '{key}' must hold text; columns: {', '.join(map(str, row))}")
    return value


if __name__ == "__main__":
    sys.exit(main())

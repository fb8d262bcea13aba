"""Rows of prompts on disk, and processes that read them, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megarl.config.data import DataConfig
from megarl.data.prompts import PromptSet, load_prompts
from megarl.data.readers import Row, iterate_rows
from megarl.data.tokenizer import load_tokenizer
from tools.prepare_reasoning_gym import train_tokenizer

ROOT = Path(__file__).parents[1]


def read_rows(patterns: Sequence[str], what: str) -> list[Row]:
    return list(iterate_rows(patterns, what))


def write_tokenizer(folder: Path) -> str:
    """A SentencePiece model of characters; "é" is one too."""
    path = folder / "tokenizer.model"
    train_tokenizer(path, ["0123456789", "a b c é", "+ - =\n"], vocab_size=22)
    return str(path)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return str(path)


def read(tokenizer: str, files: list[str], what: str = "data.train_files", reward: str = "", **keys: Any) -> PromptSet:
    """`load_prompts`, with a tokenizer that its file names."""
    data = DataConfig.model_validate({"train_files": files, **keys})
    return load_prompts(
        data,
        files,
        load_tokenizer(tokenizer),
        what,
        scorers=((reward, (), "{}"),) if reward else (),
        tokenizer_key=tokenizer,
    )


READER = """
import json, sys
import megarl.data.prompts
from prompt_rows import read
megarl.data.prompts.SMALL_BYTES = 0
tokenizer, files, keys = json.loads(sys.argv[1])
try:
    found = read(tokenizer, files, **keys)
    print(json.dumps([len(found), found.digest, found[len(found) - 1].source, *found.remarks]))
except ValueError as e:
    sys.exit(f"refused: {e}")
"""


def start_reader(tokenizer: str, files: list[str], **keys: Any) -> subprocess.Popen[str]:
    """A process that reads the files by way of the cache, however small they are; says what it found."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", READER, json.dumps([tokenizer, files, keys])],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, Any, str]:
    """Exit code, what it found, and what it said."""
    out, err = process.communicate(timeout=500)
    return process.returncode, json.loads(out) if out else None, err

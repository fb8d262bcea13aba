"""What models, rows, rewards and folders' names say reaches no terminal as a command to it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from tiny_run import ROOT, write_run

from megarl.cli.generate import Printed
from megarl.cli.main import main
from megarl.endings import ExitCode
from megarl.plain import plain, plain_output
from megarl.telemetry.console import Output

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202ereversed\u2066\x7f\x00"
COMMANDS_TO_TERMINALS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def run(*words: str, folder: Path = ROOT, module: str = "megarl.cli.main") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=folder, capture_output=True, timeout=300, env=None, check=False
    )
    return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_controls_are_shown_and_what_is_text_stays() -> None:
    assert plain("déjà\tvu\n数学 🙂") == "déjà\tvu\n数学 🙂"
    assert plain("\x1b[2J\r\x9b\u202e") == r"\u001b[2J\u000d\u009b\u202e"
    for number in [*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]:
        assert (plain(chr(number)) == chr(number)) == (chr(number) in "\t\n")
    row = {"text": HOSTILE + "\r"}
    assert json.loads(plain(json.dumps(row, ensure_ascii=False))) == row  # other programs read the same


def test_everything_printed_by_a_command_is_plain_and_rich_may_still_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    with plain_output():
        print(HOSTILE)
        table = Table("column")
        table.add_row(Text(HOSTILE))
        Output(force_terminal=True, width=200).print(table)
    assert sys.stdout is out
    text = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    drawn = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert drawn != text and not COMMANDS_TO_TERMINALS.search(drawn)
    assert drawn.count(r"a\u001b[2J\u001b]0;titl") == 2


def hostile_folder(folder: Path) -> list[str]:
    name = folder / "runs" / HOSTILE.replace("\x00", "").replace("/", "")
    name.mkdir(parents=True)
    (name / "metrics.jsonl").write_text('{"step": 1}\n')
    (name / "lock").write_text(json.dumps({"pid": 1, "ended": f"failed: {HOSTILE}"}))
    return ["runs", str(folder / "runs")]


def hostile_key(folder: Path) -> list[str]:
    return ["config", "explain", HOSTILE.replace("\x00", "")]


def hostile_value(folder: Path) -> list[str]:
    return ["plan", str(write_run(folder)), f"data.seed={HOSTILE}".replace("\x00", "")]


def hostile_file(folder: Path) -> list[str]:
    return ["eval", str(folder / HOSTILE.replace("\x00", ""))]


def hostile_reward(folder: Path) -> list[str]:
    (folder / "reward.py").write_text(f"raise ValueError({HOSTILE!r})")
    return ["train", str(write_run(folder, reward__name=f"{folder}/reward.py:score"))]


@pytest.mark.parametrize("prepare", [hostile_folder, hostile_key, hostile_value, hostile_file, hostile_reward])
def test_no_command_sends_them_to_the_terminal(
    tmp_path: Path, prepare: Callable[[Path], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    main(prepare(tmp_path))
    said = "".join(capfd.readouterr())
    assert r"\u001b[2J" in said and not COMMANDS_TO_TERMINALS.search(said)


def test_what_a_model_says_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """As it comes, token by token; tabs and lines stay."""
    printed = Printed(lambda tokens: "".join(map(chr, tokens)))
    text = [*map(ord, "1\t2\n\x1b[2J\u202e")]
    for n in range(len(text)):
        printed.show(text[:n])
    assert printed.end(text) == "1\t2\n\x1b[2J\u202e"  # a conversation goes on with what was said
    assert capsys.readouterr().out == "1\t2\n\\u001b[2J\\u202e\n"


@pytest.mark.slow
def test_a_reward_s_message_and_a_row_s_text_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(f"def score(response, row):\n    raise ValueError({HOSTILE!r})\n")
    config = write_run(
        tmp_path, reward={"name": f"{tmp_path}/reward.py:score", "trial": 0}, trainer__val_before_train=False
    )
    for words, module in ((("train", str(config)), "megarl.cli.main"), ((str(config),), "megarl.train")):
        done = run(*words, module=module)
        assert done.returncode == ExitCode.INPUT and r"\u001b[2J" in done.stdout + done.stderr
        assert not COMMANDS_TO_TERMINALS.search(done.stdout + done.stderr)
        assert not COMMANDS_TO_TERMINALS.search(json.loads((tmp_path / "run" / "lock").read_text())["ended"])

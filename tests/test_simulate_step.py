"""The simulated rank of a large job goes through all stages, and its share is the size that it should be."""

from __future__ import annotations

import re
import sys

import pytest

from tools.simulate_step import main


def test_a_rank_of_sixteen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--sequences", "256", "--tokens", "128", "--prompt", "16", "--ranks", "16", "--tp", "2"]
    monkeypatch.setattr(sys, "argv", ["simulate_step.py", *sizes, "--generation-tp", "4"])
    main()
    out = capsys.readouterr().out
    assert "256 sequences of up to 128 tokens; rank 0 of 16, TP2 x PP1 x DP8" in out
    tokens, sequences = re.search(r"has ([\d,]+) tokens of (\d+) sequences", out).groups()  # type: ignore[union-attr]
    assert (tokens, sequences) == ("4,096", "32")  # an eighth
    stages = [line.split()[-3:] for line in out.splitlines()[2:-1]]
    assert len(stages) == 9 and all(float(number) >= 0 for stage in stages for number in stage[:1])

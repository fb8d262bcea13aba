"""The simulated rank of a large job goes through all stages, and holds and computes its share alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tiny_run import ROOT

from tools.simulate_step import GIB, main


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


@pytest.mark.slow
def test_bytes_of_a_token() -> None:
    """Of an eighth of 2,048 sequences; measured are 38 bytes of each of its tokens in the end, and 69 at the peak."""
    sizes = ["--sequences", "2048", "--tokens", "16384", "--ranks", "16", "--tp", "2", "--generation-tp", "4"]
    done = subprocess.run(
        [sys.executable, "tools/simulate_step.py", *sizes],
        cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096"},  # tokens of a response that is dropped are given back
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *stages, last = done.stdout.splitlines()[2:]
    assert "has 4,194,304 tokens of 256 sequences" in last
    held, peaks = zip(*(map(float, stage.split()[-2:]) for stage in stages), strict=True)
    assert 30 < held[-1] * GIB / 4_194_304 < 46 and 55 < max(peaks) * GIB / 4_194_304 < 83

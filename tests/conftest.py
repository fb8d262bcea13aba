"""Fixtures shared by all tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Ranks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of gloo ranks that lives as long as the test session."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of SmolLM2-135M-Instruct, made once; tests that need it are skipped where it cannot be downloaded."""
    folder = ROOT / ".cache" / "smollm2"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "fetch_smollm2.py", folder], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"no SmolLM2: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)

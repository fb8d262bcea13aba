"""Megatron-Core's later versions on CPU ranks: the tests of layouts and of `transformers`, with each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import ROOT

TESTS = ("tests/test_layout_parity.py", "tests/test_models_hf.py")


def _unpacked(requirement: str, python: str, folder: Path) -> None:
    """Unpack a wheel for a version of Python, whatever runs here. Skips the test where no index has it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "--only-binary=:all:"]
    versions = ["--python-version", python, "--ignore-requires-python"]
    made = subprocess.run([*pip, *versions, requirement], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"{requirement} cannot be had: {made.stderr.strip().splitlines()[-1]}")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU host has a later version")
@pytest.mark.parametrize("version", ["0.18.0", "0.19.2"])
def test_a_later_version(version: str, tmp_path: Path) -> None:
    """Its wheels ask for Python 3.12, and its modules for Triton, which torch's build for CPUs does not bring."""
    _unpacked(f"megatron-core=={version}", "3.12", tmp_path / "megatron")
    _unpacked("triton==3.6.0", f"3.{sys.version_info.minor}", tmp_path / "triton")
    paths = [str(tmp_path / "megatron"), str(ROOT), str(tmp_path / "triton")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    code = "import megatron.core; print(megatron.core.__version__)"
    said = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.split() == [version]
    options = ["-q", "-m", "not slow", "-k", "221 or 122 or gradients", f"--basetemp={tmp_path / 'tests'}"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]

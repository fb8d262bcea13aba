"""A Python that another user of this machine starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from tiny_run import ROOT


def python_of(user: int) -> list[str]:
    """The words that begin a Python of that user; skips where root or a Python that the user may read is missing."""
    if os.getuid() or not shutil.which("setpriv"):
        pytest.skip("root alone can become another user")
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    ask = ["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if python is None or subprocess.run([python, *ask], capture_output=True, text=True).stdout.strip() != wanted:
        pytest.skip(f"no Python {wanted} of the system")
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", python]


def with_path() -> dict[str, str]:
    """This environment, for a Python that finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

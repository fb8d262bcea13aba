"""Says which version this is: a release, or a clone with its commit. `setup.py` runs this file by its path."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def version() -> str:
    """Return `0.1.0`, or `0.1.0+g1a2b3c4` in a clone of the repository, and with `.dirty` where files were changed.

    What was installed from a clone keeps the commit from which it was made.
    """
    release = _release()
    if (PACKAGE.parent / ".git").exists():
        return release + _commit(f"v{release}")
    try:
        installed = importlib.metadata.distribution("megarl")
    except importlib.metadata.PackageNotFoundError:
        return release
    here = Path(str(installed.locate_file("megarl"))).resolve() == PACKAGE
    return installed.version if here else release


def _release() -> str:
    """Read as text: importing the package would need its dependencies, which are not there when it is installed."""
    match = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match.group(1)


def _commit(tag: str) -> str:
    """Return the local part of the version; nothing at the tag of a release, and where git does not answer."""
    if tag in _git("tag", "--points-at", "HEAD").split() and not _git("status", "--porcelain", "-uno"):
        return ""
    commit = _git("describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=.dirty")
    return f"+g{commit}" if commit else ""


def _git(*words: str) -> str:
    try:
        command = ["git", "-C", str(PACKAGE.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

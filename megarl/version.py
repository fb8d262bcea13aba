"""Says which version this is: a release, or a clone with its commit. `setup.py` runs this file by its path."""

from __future__ import annotations

import importlib.metadata
import os
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
        return release + _local_part(release)
    try:
        installed = importlib.metadata.distribution("megarl")
    except importlib.metadata.PackageNotFoundError:
        return release
    here = Path(str(installed.locate_file("megarl"))).resolve() == PACKAGE
    return installed.version if here else release


def _release() -> str:
    """Read the release as text: importing the package needs its dependencies, which are not there at installation."""
    match = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match.group(1)


def commit_of(package: Path) -> tuple[str, bool] | None:
    """Return the commit of the working copy that a package belongs to, and whether one of its files was changed.

    None where git has no answer, and where the package only lies below another project.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    described = _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or ""
    commit, _, changed = described.partition("-")
    return (commit, bool(changed)) if commit else None


def _local_part(release: str) -> str:
    """Return what follows the release in a clone; nothing at the release's tag, and where git does not answer."""
    if (working_copy := commit_of(PACKAGE)) is None:
        return ""
    commit, changed = working_copy
    if not changed and f"v{release}" in (_git(PACKAGE, "tag", "--points-at", "HEAD") or "").split():
        return ""
    return f"+g{commit[:7]}{'.dirty' if changed else ''}"


def _git(folder: Path, *words: str) -> str | None:
    """Ask git about a folder; None if it has no answer."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *words]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=20, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None

"""Finds the files of installed packages: what a process must see to import them, and nothing else."""

from __future__ import annotations

import importlib.metadata as metadata
import os
from collections.abc import Sequence


def files_of(distributions: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders and files of distributions and of all that they require, and the folders to import them from.

    Args:
        distributions: requirements, such as "math-verify[antlr4_13_2]"; what is not installed is left out.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    shown, roots, seen = dict[str, None](), dict[str, None](), set[tuple[str, str]]()
    requirements = [Requirement(text) for text in distributions]
    while requirements:
        requirement = requirements.pop()
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:  # of another platform; or the import says what is missing
            continue
        root = os.path.realpath(str(distribution.locate_file("")))
        for extra in ("", *requirement.extras):
            if (key := (canonicalize_name(requirement.name), extra)) in seen:
                continue
            seen.add(key)
            for other in map(Requirement, distribution.requires or ()):
                if other.marker is None or other.marker.evaluate({"extra": extra}):
                    requirements.append(other)
        roots[root] = None
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                shown[os.path.join(root, file.parts[0])] = None
    return list(shown), list(roots)

"""What mkdocs calls while it builds the site: what the code knows goes into the pages, formulas become MathML.

A page asks for generated text with a line of its own, `<!-- generate: NAME arguments -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from megarl_docs import (  # noqa: E402
    algorithms,
    cells,
    commands,
    endpoint,
    figures,
    formulas,
    keys,
    metrics,
    migration,
    plans,
    rewards,
)

GENERATORS: dict[str, Callable[..., str]] = {
    "algorithm": algorithms.declared,
    "algorithms": algorithms.listed,
    "commands": commands.reference,
    "endpoint": endpoint.parameters,
    "keys": keys.reference,
    "methods": algorithms.methods,
    "metrics": metrics.reference,
    "migration": migration.reference,
    "plans": plans.table,
    "rewards": rewards.reference,
}
"""Name -> the Markdown that stands for it, given the words after the name."""

FIGURES = ("configs", "launch", "tools")
"""Folders of the repository whose pictures the pages show, as figures/NAME.png."""

_MARK = re.compile(r"^<!-- generate: (\w+)((?: [^ >]+)*) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The repository's pictures, beside the pages' own files."""
    for path in sorted(path for folder in FIGURES for path in (HERE.parent / folder).glob("*.png")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with what it asks for."""
    return _MARK.sub(lambda found: GENERATORS[found[1]](*found[2].split()), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas and drawings, without any script or further file; tables that narrow screens can show, too."""
    return cells.fitted(figures.inline(formulas.as_mathml(html), HERE / "drawings"))

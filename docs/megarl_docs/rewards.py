"""The rewards that come with MegaRL, from their docstrings."""

from __future__ import annotations

import inspect

from megarl.cli.algorithms import arguments_of
from megarl.rewards.registry import load_reward, names
from megarl_docs.tables import code


def reference() -> str:
    """A section for each."""
    return "\n".join(_section(name) for name in names())


def _section(name: str) -> str:
    function = load_reward(name).function
    text, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    described = f"\n```text\n{inspect.cleandoc(arguments)}\n```\n" if arguments else ""
    taken = arguments_of(function)
    return f"## {name}\n\n{text.strip()}\n\n`reward.args`: {code(taken) or 'none'}\n{described}"

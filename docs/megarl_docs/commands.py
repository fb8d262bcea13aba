"""The reference of commands: what each says with `--help`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

from megarl.cli import main as cli

_COMMANDS = re.compile(r"((?:\w+ \| )+\w+) \.\.\.")
"""How the usage of a command names those below it."""


def reference() -> str:
    """`megarl`, then every command and what belongs to it."""
    return "\n".join(f"## {' '.join(['megarl', *words])}\n\n```text\n{text}```\n" for words, text in helps([]))


def helps(words: list[str]) -> list[tuple[list[str], str]]:
    """(words, what they print with --help) of a command and those below it."""
    text = help_of(words)
    usage = " ".join(text.partition("\n\n")[0].split())
    named = _COMMANDS.search(usage)
    below = (re.findall(r"\w+", named[1]) if named else []) if words else list(cli.COMMANDS)
    return [(words, text), *(found for name in below for found in helps([*words, name]))]


def help_of(words: list[str]) -> str:
    """100 columns wide and without colours."""
    said = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return said.getvalue()

"""The words that several commands take, and what the shell is offered for them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any


def add_config(parser: argparse.ArgumentParser) -> None:
    """`CONFIG key=value ...`"""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """`key=value ...`"""
    words: Any = parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="configuration keys to set"
    )
    words.completer = keys


def add_words(parser: argparse.ArgumentParser) -> None:
    """`[CONFIG] key=value ...`"""
    described = "YAML file, default the run's own configuration; and configuration keys to set"
    words: Any = parser.add_argument("words", nargs="*", default=[], metavar="[CONFIG] key=value", help=described)
    words.completer = keys


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """`[CONFIG] key=value ...` -> the file, if there is one, and the rest.

    Raises:
        ValueError: a word is neither a file nor key=value.
    """
    left = list(words)
    file = left.pop(0) if left and ("=" not in left[0] or os.path.isfile(left[0])) else None
    for word in left:
        if "=" not in word:
            raise ValueError(f"'{word}' is not of the form key=value; CONFIG comes right after the paths, and once")
    return file, left


def keys(prefix: str, **_: object) -> Iterable[str]:
    """Keys that begin so, up to the next dot: whole lists of hundreds are of no use; then the values of a choice."""
    from megarl.config.describe import describe_all

    key, sep, _value = prefix.partition("=")
    described = {one.key: one for one in describe_all()}
    if sep:
        return [f"{key}={value}" for value in described[key].choices] if key in described else []
    depth = prefix.count(".") + 1
    offered = []
    for name in described:
        if name.startswith(prefix):
            parts = name.split(".")
            offered.append(f"{name}=" if len(parts) <= depth else ".".join(parts[:depth]) + ".")
    return list(dict.fromkeys(offered))

"""Adds arguments that several commands share, with their completion in a shell."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `CONFIG key=value ...`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the argument `key=value ...`."""
    words: Any = parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="configuration keys to set"
    )
    words.completer = keys


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the argument `[CONFIG] key=value ...`."""
    text = "YAML file, default the run's own configuration; and configuration keys to set"
    words: Any = parser.add_argument("words", nargs="*", default=[], metavar="[CONFIG] key=value", help=text)
    words.completer = keys


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `path` and `--best`, which name a checkpoint."""
    parser.add_argument(
        "path", help="checkpoint (global_step_N), run folder (its newest one), Hugging Face folder, or model of its Hub"
    )
    add_best(parser)


def add_best(parser: argparse.ArgumentParser) -> None:
    """Add the option `--best`."""
    parser.add_argument("--best", action="store_true", help="take the checkpoint that the run's best.json names")


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `[CONFIG] key=value ...` into the file, or None, and the overrides.

    Raises:
        ValueError: a word is neither a file nor key=value.
    """
    overrides = list(words)
    file = overrides.pop(0) if overrides and ("=" not in overrides[0] or os.path.isfile(overrides[0])) else None
    for word in overrides:
        if "=" not in word:
            raise ValueError(f"'{word}' is not of the form key=value; CONFIG comes right after the paths, and once")
    return file, overrides


def keys(prefix: str, **_: object) -> Iterable[str]:
    """Complete a key up to its next dot, because a list of hundreds is of no use, or the value of a choice."""
    from megarl.config.describe import describe_all

    key, sep, _value = prefix.partition("=")
    descriptions = {description.key: description for description in describe_all()}
    if sep:
        return [f"{key}={value}" for value in descriptions[key].choices] if key in descriptions else []
    depth = prefix.count(".") + 1
    completions = []
    for name in descriptions:
        if name.startswith(prefix):
            parts = name.split(".")
            completions.append(f"{name}=" if len(parts) <= depth else ".".join(parts[:depth]) + ".")
    return list(dict.fromkeys(completions))

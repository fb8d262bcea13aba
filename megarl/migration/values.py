"""Reads settings from texts, options and YAML files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.config.load import LARGEST, check_interpolations, read_yaml
from megarl.migration.entry import Computed

_OVERRIDE = re.compile(r"^[a-z]\w*=")
_OPERATOR = re.compile(r"^(\d?>|[|&;])")


def value_of(text: str) -> Any:
    """Read a value as Hydra does: as YAML, in which 1e-6 is a number."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text.strip()}"]))["x"]  # type: ignore[index,call-overload]
    except Exception:  # the parser raises anything; a value that is no YAML is text
        return text.strip("'\"")


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Read `--name value`, `--name=value`, `--name a b` (a list), `--name` (true) and `--no_name` (false)."""
    options: dict[str, Any] = {}
    at: str | None = None
    for word in words:
        if word.startswith("--"):
            name, sign, text = word[2:].partition("=")
            at = name.replace("-", "_")
            options[at] = [text] if sign else []
        elif re.match(r"-[A-Za-z]", word):  # a launcher's, such as -m
            at = None
        elif at is not None and not _OVERRIDE.match(word):
            options[at].append(word)
    values: dict[str, Any] = {}
    for name, texts in options.items():
        if not texts and name.startswith("no_"):
            values[name.removeprefix("no_")] = False
        else:
            items = [Computed(text) if "$" in text else value_of(text) for text in texts]
            values[name] = True if not items else items[0] if len(items) == 1 else items
    return values


def end_of_command(words: Sequence[str], start: int) -> int:
    """Find the place behind a command's last word: that of a pipe, of a redirection, or the end."""
    return next((i for i, word in enumerate(words) if i > start and _OPERATOR.match(word)), len(words))


def read_text(path: str) -> str:
    """Read a file's text.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        _check_file(path)
        if os.path.getsize(path) > LARGEST:
            raise ValueError(f"'{path}' cannot be read: it has more than {LARGEST} bytes")
        with open(path, encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"'{path}' cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _check_file(path: str) -> None:
    if not os.path.isfile(path):  # a pipe would be waited for
        raise ValueError(f"'{path}' cannot be read: {'it is no file' if os.path.exists(path) else 'No such file'}")


def of_yaml(path: str) -> dict[str, Any]:
    """Read a YAML file's settings by dotted key; raises as `tree_of`."""
    return flat(tree_of(path))


def tree_of(path: str) -> Any:
    """Read a YAML file's settings as OmegaConf has them.

    Raises:
        ValueError: the file cannot be read, or holds no settings.
    """
    _check_file(path)
    try:
        tree = read_yaml(path)
        if not OmegaConf.is_dict(tree):
            raise ValueError("it must hold sections such as 'data:'")
        check_interpolations(tree, dangling=True)
    except Exception as e:  # the parsers raise what they like
        raise ValueError(f"'{path}' is not valid YAML: {' '.join(str(e).split())[:200]}") from e
    return tree


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """List the leaves of a tree by dotted key. A value that refers to a missing key is `Computed`; one that refers to
    the environment stays as the file has it."""
    values: dict[str, Any] = {}
    written: Any = OmegaConf.to_container(tree, resolve=False)
    for name in tree:
        key = f"{prefix}{name}"
        if key in ("defaults", "hydra") or str(name) == "_target_":  # settings of Hydra itself
            continue
        if "${oc.env:" in str(written[name]) and not isinstance(written[name], dict):
            values[key] = written[name]
            continue
        try:
            value = tree[name]
        except Exception:  # an interpolation of the other program's own
            if not OmegaConf.is_missing(tree, name):
                values[key] = Computed(written[name])
            continue
        if OmegaConf.is_dict(value):
            values |= flat(value, f"{key}.")
        else:
            values[key] = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
    return values

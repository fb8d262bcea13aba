"""Settings as YAML writes them: values, and files."""

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
    """As Hydra reads it: YAML, whose numbers may be written 1e-6."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text.strip()}"]))["x"]  # type: ignore[index,call-overload]
    except Exception:  # the parser raises what it likes: what is no YAML is text
        return text.strip("'\"")


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name a b` (a list), `--name` (true) and `--no_name` (false)."""
    options: dict[str, Any] = {}
    at: str | None = None
    for word in words:
        if word.startswith("--"):
            name, given, text = word[2:].partition("=")
            at = name.replace("-", "_")
            options[at] = [text] if given else []
        elif re.match(r"-[A-Za-z]", word):  # a launcher's, such as -m
            at = None
        elif at is not None and not _OVERRIDE.match(word):
            options[at].append(word)
    values: dict[str, Any] = {}
    for name, texts in options.items():
        if not texts and name.startswith("no_"):
            values[name.removeprefix("no_")] = False
        else:
            read = [Computed(text) if "$" in text else value_of(text) for text in texts]
            values[name] = True if not read else read[0] if len(read) == 1 else read
    return values


def end_of_command(words: Sequence[str], start: int) -> int:
    """The place behind a command's last word: of a pipe, a redirection or the end."""
    return next((i for i, word in enumerate(words) if i > start and _OPERATOR.match(word)), len(words))


def read_text(path: str) -> str:
    """A file's text.

    Raises:
        ValueError: it cannot be read.
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
    """A YAML file's settings by dotted key; raises as `tree_of`."""
    return flat(tree_of(path))


def tree_of(path: str) -> Any:
    """A YAML file's settings as OmegaConf has them.

    Raises:
        ValueError: it cannot be read, or holds no settings.
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
    """Leaves by dotted key; a value that refers to what is not there is a computed one, and one of the environment's
    stays as it is written."""
    values: dict[str, Any] = {}
    written: Any = OmegaConf.to_container(tree, resolve=False)
    for name in tree:
        key = f"{prefix}{name}"
        if key in ("defaults", "hydra") or str(name) == "_target_":  # what Hydra is told
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

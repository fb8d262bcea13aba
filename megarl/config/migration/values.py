"""Settings as YAML writes them: values, and files."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf

from megarl.config.load import check_interpolations, check_yaml


def value_of(text: str) -> Any:
    """As Hydra reads it: YAML, whose numbers may be written 1e-6."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text.strip()}"]))["x"]  # type: ignore[index,call-overload]
    except Exception:  # the parser raises what it likes: what is no YAML is text
        return text.strip("'\"")


def read_text(path: str) -> str:
    """A file's text.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise ValueError(f"'{path}' cannot be read: it is no file")
        with open(path, encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"'{path}' cannot be read: {getattr(e, 'strerror', None) or e}") from e


def of_yaml(path: str) -> dict[str, Any]:
    """A YAML file's settings by dotted key.

    Raises:
        ValueError: it cannot be read, or holds no settings.
    """
    text = read_text(path)
    try:
        check_yaml(path)
        tree: Any = OmegaConf.create(text)
        if not OmegaConf.is_dict(tree):
            raise ValueError("it must hold sections such as 'data:'")
        check_interpolations(tree)
    except Exception as e:  # the parsers raise what they like
        raise ValueError(f"'{path}' is not valid YAML: {' '.join(str(e).split())[:200]}") from e
    return flat(tree)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; a value that refers to what is not there is not set, and one of the environment's stays as
    it is written."""
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
        except Exception:  # an interpolation of the other program's own: its default
            continue
        if OmegaConf.is_dict(value):
            values |= flat(value, f"{key}.")
        else:
            values[key] = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
    return values

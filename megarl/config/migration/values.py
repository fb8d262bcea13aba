"""Settings as YAML writes them: values, and files."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


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
        tree: Any = OmegaConf.create(text)
        if not OmegaConf.is_dict(tree):
            raise ValueError("it must hold sections such as 'data:'")
    except Exception as e:  # the parsers raise what they like
        raise ValueError(f"'{path}' is not valid YAML: {' '.join(str(e).split())[:200]}") from e
    return flat(tree)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; a value that refers to what is not there is not set."""
    values: dict[str, Any] = {}
    for name in tree:
        key = f"{prefix}{name}"
        if key in ("defaults", "hydra") or str(name) == "_target_":  # what Hydra is told
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

"""Hides secrets in records, pages and messages: passwords, tokens and values of the environment.

A value that came from `${oc.env:NAME}` is written as in the file. Hidden are the user name and password of a URL, and
the value of a key that names a secret (api_key, token, password ...).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

HIDDEN = "[hidden]"
VARIABLE = "MEGARL_HIDDEN_VALUES"
"""Variable with the secrets for an evaluation's ranks, whose configuration is a record: JSON, dotted key -> value."""

_SHORT = 6  # characters: a shorter value is no secret and occurs in unrelated texts
_WORDS = r"(?:pass(?:word|wd|phrase)|secrets?|credentials?|api_?keys?|(?:access|private|secret|auth)_?keys?(?:_id)?)"
_NAME = re.compile(rf"(?:^|[_.\-])(?:{_WORDS}|token|authorization|bearer|cookie)$", re.IGNORECASE)
_NO_SECRET = re.compile(
    r"(?:^|[_.\-])(?:eos|bos|pad|unk|stop|mask|max|min|num|n|new|end|special|image)_token$", re.IGNORECASE
)
_IN_ENVIRONMENT = re.compile(rf"{_WORDS}|creds?$|token|_key$|^key$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^\s/@?#'\"]+(?=@)")
_IN_TEXT = re.compile(
    r"(\bBearer\s+|[?&](?:token|key|api_?key|password|secret|sig|signature)=)[^\s&'\"]+", re.IGNORECASE
)

_written: dict[tuple[str, str], str] = {}  # (dotted key, value) -> the file's text
_known: set[str] = set()  # values that messages hide


def names_secret(key: str) -> bool:
    """Tell whether the last part of a dotted key names a secret."""
    last = key.rpartition(".")[2]
    return bool(_NAME.search(last)) and not _NO_SECRET.search(last)


def note_written(tree: DictConfig) -> None:
    """Note how a configuration's file writes the values that come from the environment."""
    for key, value, raw in _from_environment(tree, ""):
        _written[key, _plain(value)] = raw


def note_environment() -> None:
    """Note the values of environment variables with names of secrets, so that messages hide them."""
    for name, value in os.environ.items():
        if len(value) >= _SHORT and _IN_ENVIRONMENT.search(name) and name != VARIABLE:
            _known.add(value)


def is_from_environment(key: str, value: Any) -> bool:
    """Tell whether a configuration's value came from an environment variable."""
    return (key, _plain(value)) in _written


def note_secrets(values: Any, key: str = "") -> None:
    """Note the values of keys that name secrets, so that messages hide them."""
    for leaf, value in _leaves(values, key):
        if isinstance(value, str) and names_secret(leaf) and len(value) >= _SHORT and "${" not in value:
            _known.add(value)


def for_records(values: Any, key: str = "") -> Any:
    """Replace the secrets in a tree of values, for records.

    Args:
        key: the tree's dotted key.
    """
    if (raw := _written.get((key, _plain(values)))) is not None:
        return raw
    if isinstance(values, dict):
        return {name: for_records(value, f"{key}.{name}" if key else str(name)) for name, value in values.items()}
    if isinstance(values, list | tuple):
        single = _written.get((key, _plain(values[0]))) if len(values) == 1 else None  # a text that became a list
        return [single] if single is not None else [for_records(value, f"{key}.{i}") for i, value in enumerate(values)]
    if isinstance(values, str):
        return HIDDEN if values and names_secret(key) and "${" not in values else hide(values)
    return values


def hide(text: str) -> str:
    """Remove known secrets from a text, those in URLs, and the word after Bearer."""
    for secret in _known:
        text = text.replace(secret, HIDDEN)
    return _IN_TEXT.sub(rf"\g<1>{HIDDEN}", _USER_INFO.sub(HIDDEN, text))


def without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """Drop secrets from values by dotted key, because another password makes no other run. A value of the environment
    is replaced by the file's text."""
    file_texts = {value: raw for (_, value), raw in _written.items() if len(value) >= _SHORT}
    return {
        key: hide(file_texts.get(value, value)) if isinstance(value, str) else value
        for key, value in values.items()
        if not names_secret(key)
    }


def hidden_values(values: Any) -> dict[str, Any]:
    """Return the values that records hide, wholly or partly, by dotted key."""
    recorded = dict(_leaves(for_records(values), ""))
    return {key: value for key, value in _leaves(values, "") if HIDDEN in str(recorded.get(key))}


def hand_over(values: Any, environment: Any) -> None:
    """Hand the values that a record hides to the child processes that will read the record."""
    environment[VARIABLE] = json.dumps(hidden_values(values))


def filled(values: Any, key: str = "") -> Any:
    """Fill the hidden values of a record with those that were handed to this process."""
    secrets = json.loads(os.environ.get(VARIABLE) or "{}")
    return _filled(values, key, secrets) if secrets else values


def left_out(values: Any) -> list[str]:
    """List the keys whose values are still hidden."""
    return [key for key, value in _leaves(values, "") if isinstance(value, str) and HIDDEN in value]


def _filled(values: Any, key: str, secrets: dict[str, Any]) -> Any:
    if isinstance(values, dict):
        return {name: _filled(value, f"{key}.{name}" if key else str(name), secrets) for name, value in values.items()}
    if isinstance(values, list):
        return [_filled(value, f"{key}.{i}", secrets) for i, value in enumerate(values)]
    return secrets.get(key, values) if isinstance(values, str) and HIDDEN in values else values


def _leaves(values: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        for i, value in enumerate(values):
            yield from _leaves(value, f"{key}.{i}")
    else:
        yield key, values


def _plain(value: Any) -> str:
    """Write a value so that a file's text and the key's value are equal: "8" and 8, "true" and True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_reads: list[str] = []


def _env(*args: Any) -> Any:
    value = oc.env(*args)
    _reads.append(args[0])
    if isinstance(value, str) and len(value) >= _SHORT and _IN_ENVIRONMENT.search(args[0]):
        _known.add(value)
    return value


OmegaConf.register_resolver("oc.env", _env, replace=True)


def _from_environment(node: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, the file's text) of each interpolation that read a variable."""
    raw = OmegaConf.to_container(node, resolve=False)
    names = list(range(len(node))) if isinstance(node, ListConfig) else list(node)
    for name in names:
        key = f"{prefix}.{name}" if prefix else str(name)
        if OmegaConf.is_missing(node, name):
            continue
        before = len(_reads)
        value = node[name]
        if OmegaConf.is_config(value):
            yield from _from_environment(value, key)
        elif OmegaConf.is_interpolation(node, name) and len(_reads) > before:
            yield key, value, raw[name]  # type: ignore[index]

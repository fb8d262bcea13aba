"""What no record, page or message shows of a configuration: passwords, tokens, and what the environment holds.

A value that `${oc.env:NAME}` gave is written as it stood in the file. Of a URL the name and password before the host
are hidden, of a key that names a secret (api_key, token, password ...) the value.
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
"""For the ranks of an evaluation, whose configuration file is a record: JSON, dotted key -> value."""

_SHORT = 6  # characters: what is shorter is no secret, and stands in texts that have nothing to do with it
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

_written: dict[tuple[str, str], str] = {}  # (dotted key, value) -> as the file has it
_known: set[str] = set()  # values that messages do not show


def names_secret(key: str) -> bool:
    """Whether a dotted key's last part says that its value is one."""
    last = key.rpartition(".")[2]
    return bool(_NAME.search(last)) and not _NO_SECRET.search(last)


def note_written(tree: DictConfig) -> None:
    """Note how values that come from the environment stand in a configuration that was read."""
    for key, value, raw in _from_environment(tree, ""):
        _written[key, _plain(value)] = raw


def note_environment() -> None:
    """Note the values of variables whose names say that they are secret, so that no message shows them."""
    for name, value in os.environ.items():
        if len(value) >= _SHORT and _IN_ENVIRONMENT.search(name) and name != VARIABLE:
            _known.add(value)


def is_from_environment(key: str, value: Any) -> bool:
    """Whether a value of a configuration that was read came from a variable."""
    return (key, _plain(value)) in _written


def note_secrets(values: Any, key: str = "") -> None:
    """Note the values of keys that name secrets, so that no message shows them."""
    for leaf, value in _leaves(values, key):
        if isinstance(value, str) and names_secret(leaf) and len(value) >= _SHORT and "${" not in value:
            _known.add(value)


def for_records(values: Any, key: str = "") -> Any:
    """A tree of values as records show it.

    Args:
        key: the tree's own, dotted.
    """
    if (raw := _written.get((key, _plain(values)))) is not None:
        return raw
    if isinstance(values, dict):
        return {name: for_records(value, f"{key}.{name}" if key else str(name)) for name, value in values.items()}
    if isinstance(values, list | tuple):
        one = _written.get((key, _plain(values[0]))) if len(values) == 1 else None  # a text that became a list of one
        return [one] if one is not None else [for_records(value, f"{key}.{i}") for i, value in enumerate(values)]
    if isinstance(values, str):
        return HIDDEN if values and names_secret(key) and "${" not in values else hide(values)
    return values


def hide(text: str) -> str:
    """A text without the secrets that are known, those of URLs, and what follows the word Bearer."""
    for secret in _known:
        text = text.replace(secret, HIDDEN)
    return _IN_TEXT.sub(rf"\g<1>{HIDDEN}", _USER_INFO.sub(HIDDEN, text))


def without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted key, without those that are secrets: another password makes no other run. What the environment
    gave stands as it was written."""
    written = {value: raw for (_, value), raw in _written.items() if len(value) >= _SHORT}
    return {
        key: hide(written.get(value, value)) if isinstance(value, str) else value
        for key, value in values.items()
        if not names_secret(key)
    }


def hidden_values(values: Any) -> dict[str, Any]:
    """Of a tree, by dotted key, those of which records do not show all."""
    recorded = dict(_leaves(for_records(values), ""))
    return {key: value for key, value in _leaves(values, "") if HIDDEN in str(recorded.get(key))}


def hand_over(values: Any, environment: Any) -> None:
    """Give processes that will read the record of these values what it does not show."""
    environment[VARIABLE] = json.dumps(hidden_values(values))


def filled(values: Any, key: str = "") -> Any:
    """A record's tree with the values that were handed over to this process."""
    given = json.loads(os.environ.get(VARIABLE) or "{}")
    return _filled(values, key, given) if given else values


def left_out(values: Any) -> list[str]:
    """Keys whose values a record does not show, and nobody handed over."""
    return [key for key, value in _leaves(values, "") if isinstance(value, str) and HIDDEN in value]


def _filled(values: Any, key: str, given: dict[str, Any]) -> Any:
    if isinstance(values, dict):
        return {name: _filled(value, f"{key}.{name}" if key else str(name), given) for name, value in values.items()}
    if isinstance(values, list):
        return [_filled(value, f"{key}.{i}", given) for i, value in enumerate(values)]
    return given.get(key, values) if isinstance(values, str) and HIDDEN in values else values


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
    """Equal for the text of a file and what a key makes of it: "8" and 8, "true" and True."""
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
    """Dotted key, value, and how it is written, of each interpolation for which a variable was read."""
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

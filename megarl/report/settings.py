"""The configurations of several runs beside the defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel

from megarl.config.schema import Config
from megarl.report.runs import Run

CONFIG_FILE = "config.yaml"
_MISSING = object()
_LIKE_THE_ACTOR = ("critic.megatron.", "reward_model.megatron.", "teacher.megatron.")
_ACTORS = "actor_rollout_ref.actor.megatron."


def settings(runs: Sequence[Run]) -> dict[str, Any]:
    """A row for each key of the schema and of the runs' files.

    Returns:
        rows: key, description, default, the values of the runs (None: the file has none), whether each differs from its
            default. Values are texts.
        unreadable: of each run, why its file cannot be read; empty: it can.
    """
    known = dict(_keys(Config))
    defaults = _flat(Config().model_dump(), known)
    of_runs, unreadable = [], []
    for run in runs:
        written, why = _read(run, known)
        of_runs.append(written)
        unreadable.append(why)
    keys = dict.fromkeys([*known, *(key for values in of_runs for key in values)])
    rows = []
    for key in keys:
        default = defaults.get(key, _MISSING)
        values = [of_run.get(key, _MISSING) for of_run in of_runs]
        differs = [
            value is not _MISSING and value != _default(key, default, of_run)
            for value, of_run in zip(values, of_runs, strict=True)
        ]
        shown = [None if value is _MISSING else _text(value) for value in (default, *values)]
        rows.append([key, known.get(key, ""), shown[0], shown[1:], differs])
    return {"rows": rows, "unreadable": unreadable}


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of the keys that are not themselves sections, with their descriptions."""
    for name, field in section.model_fields.items():
        sub = field.annotation
        if isinstance(sub, type) and issubclass(sub, BaseModel):
            yield from _keys(sub, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description or ""


def _flat(tree: Mapping[str, Any], known: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; a key of the schema that holds a mapping keeps it."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in known:
            found |= _flat(value, known, f"{key}.")
        else:
            found[key] = value
    return found


def _default(key: str, default: Any, of_run: Mapping[str, Any]) -> Any:
    """A Megatron key of another model is by default what the actor's is."""
    for prefix in _LIKE_THE_ACTOR:
        if key.startswith(prefix):
            return of_run.get(_ACTORS + key.removeprefix(prefix), default)
    return default


def _read(run: Run, known: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    path = os.path.join(run.folder, CONFIG_FILE)
    if not os.path.exists(path):
        return {}, f"{CONFIG_FILE} is not there"
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as e:  # the parsers raise what they like
        return {}, f"{CONFIG_FILE} cannot be read: {' '.join(str(e).split())[:200]}"
    if not isinstance(tree, dict):
        return {}, f"{CONFIG_FILE} holds no sections"
    return _flat({str(key): value for key, value in tree.items()}, known), ""


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value if value else '""'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)

"""Compares the configurations of several runs and the defaults in a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.config.describe import describe_all, flat, yaml_value
from megarl.config.load import CONFIG_FILE, read_yaml
from megarl.config.schema import Config
from megarl.config.secrets import for_records
from megarl.report.runs import Run

_MISSING = object()
_LIKE_THE_ACTOR = ("critic.megatron.", "reward_model.megatron.", "teacher.megatron.")
_ACTORS = "actor_rollout_ref.actor.megatron."


def settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Make a row for each key of the schema and of the runs' files.

    Returns:
        rows: key, description, default, the values of the runs (None: not in the file), whether each value differs from
            its default. Values are texts.
        unreadable: for each run why its file cannot be read; empty: the file is readable.
    """
    known = {description.key: description.text for description in describe_all()}
    defaults = flat(Config().model_dump(), known)
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
        texts = [None if value is _MISSING else yaml_value(value) or '""' for value in (default, *values)]
        rows.append([key, known.get(key, ""), texts[0], texts[1:], differs])
    return {"rows": rows, "unreadable": unreadable}


def _default(key: str, default: Any, of_run: Mapping[str, Any]) -> Any:
    """Return a key's default: for another model's Megatron key the actor's value."""
    for prefix in _LIKE_THE_ACTOR:
        if key.startswith(prefix):
            return of_run.get(_ACTORS + key.removeprefix(prefix), default)
    return default


def _read(run: Run, known: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    path = os.path.join(run.folder, CONFIG_FILE)
    if not os.path.exists(path):
        return {}, f"{CONFIG_FILE} is not there"
    try:
        tree = OmegaConf.to_container(read_yaml(path), resolve=False)
    except Exception as e:  # the parsers raise anything
        return {}, f"{CONFIG_FILE} cannot be read: {' '.join(str(e).split())[:200]}"
    if not isinstance(tree, dict):
        return {}, f"{CONFIG_FILE} holds no sections"
    values = {str(key): value for key, value in tree.items()}
    return flat(for_records(values), known), ""  # a record of an older version may hold a secret

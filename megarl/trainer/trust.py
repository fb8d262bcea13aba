"""Checks that the caller trusts the code and the hosts that a configuration names. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megarl.config import Config, secrets


def user_files(values: Any) -> Iterator[tuple[str, str]]:
    """Yield keys that name a user's code, as path/to/file.py:name, with the file."""
    for key, value in _leaves(values, ""):
        if isinstance(value, str) and (file := value.rpartition(":")[0]).endswith(".py"):
            yield key, file


def without_sandbox(values: Any) -> list[str]:
    """List the keys by which programs that a model writes run without the sandbox."""
    return [key for key, value in _leaves(values, "") if key.endswith(".isolation") and value == "process"]


def unsafe_remarks(config: Config) -> Iterator[str]:
    """Yield the lines that the start of a run says of them."""
    for key in without_sandbox(config.model_dump()):
        yield f"{key} = process: programs that the model writes run without sandbox, with your files and your network"


def asked_hosts(values: Any) -> Iterator[tuple[str, str]]:
    """Yield keys that name hosts which an evaluation sends responses, or data from the environment, to."""
    for key, value in _leaves(values, ""):
        if not isinstance(value, str) or key.startswith("telemetry.") or "://" not in value:
            continue
        if "http" in value.lower() or secrets.is_from_environment(key, value):
            yield key, value


def check_trusted(config: Config, run_dir: str, overrides: Sequence[str]) -> None:
    """Refuse a run's recorded configuration that decides which code runs or which hosts are asked, unless the caller
    names the keys.

    Args:
        run_dir: the run's folder.
        overrides: what the caller names, `key=value`.

    Raises:
        ValueError: it names files with code or hosts, or takes the sandbox away, and the caller does not.
    """
    values, named = config.model_dump(), [item.partition("=")[0] for item in overrides]
    dangers = [(key, f"imports {file}") for key, file in user_files(values)]
    dangers += [(key, "runs what the model writes without sandbox") for key in without_sandbox(values)]
    dangers += [(key, f"sends responses to {secrets.hide(host)}") for key, host in asked_hosts(values)]
    for key, danger in dangers:
        if not any(key == name or key.startswith(f"{name}.") for name in named):
            raise ValueError(
                f"the configuration that {run_dir} recorded {danger} ({key}); if you trust that folder, give --trust, "
                f"or name a configuration file, or set {key}"
            )


def check_family_trusted(config: Config, overrides: Sequence[str] | None) -> None:
    """Refuse a model family's file that only a run's recorded configuration names.

    Args:
        overrides: what the caller names, `key=value`; None: the caller names the configuration.

    Raises:
        ValueError: the file is named there alone.
    """
    key, file = "actor_rollout_ref.model.family", config.actor_rollout_ref.model.family
    if file and overrides is not None and not any(word.startswith(f"{key}=") for word in overrides):
        raise ValueError(f"the configuration that the run recorded imports {file} ({key}); if you trust it, set {key}")


def _leaves(values: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, values

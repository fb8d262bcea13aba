"""Reads names of models on the Hugging Face Hub, finds their folders in the local cache. Makes no request; torch-free.

Qwen/Qwen2.5-0.5B            the Hub's default branch
Qwen/Qwen2.5-0.5B@v1         a branch, a tag or a commit
$HF_HOME/hub/models--Qwen--Qwen2.5-0.5B/snapshots/COMMIT/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_NAME = re.compile(r"((?!-)[\w.-]*\w/(?!-)[\w.-]*\w)(?:@([\w.-]+(?:/[\w.-]+)*))?", re.ASCII)
_FOLDERS = ("checkpoints", "data", "models", "runs")
"""No users of the Hub: what begins so is a path, which may be mistyped."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """Names a model of the Hub.

    Attributes:
        repository: such as Qwen/Qwen2.5-0.5B.
        revision: a branch, a tag or a commit; empty: the default branch.
    """

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    @property
    def is_pinned(self) -> bool:
        """Say whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def storage(self) -> str:
        """Name the model's folder in the cache, with all its revisions."""
        from huggingface_hub.constants import HF_HUB_CACHE

        return os.path.join(HF_HUB_CACHE, f"models--{self.repository.replace('/', '--')}")

    @property
    def folder(self) -> str:
        """Name the folder of the commit in the cache."""
        assert self.is_pinned
        return os.path.join(self.storage, "snapshots", self.revision)


def hub_model(path: str) -> HubModel | None:
    """Read the value of a key that names a model; None for a file or a folder, which wins where it is there."""
    return None if os.path.lexists(path) else _parsed(path)


def hidden_by_folder(path: str) -> HubModel | None:
    """Return the model that this machine has of the Hub's, and that a folder of the same name keeps from being read."""
    model = _parsed(path)
    return model if model is not None and os.path.lexists(path) and os.path.isdir(model.storage) else None


def folder_of(path: str) -> str:
    """Return the folder that a path stands for: that of a commit of a Hub's model in the cache, or the path itself."""
    model = hub_model(path)
    return model.folder if model is not None and model.is_pinned else path


def _parsed(path: str) -> HubModel | None:
    match = _NAME.fullmatch(path)
    if match is None or ".." in path or "--" in match[1] or match[1].startswith(".") or "/." in match[1]:
        return None
    if match[1].split("/")[0] in _FOLDERS:
        return None
    return HubModel(match[1], match[2] or "")

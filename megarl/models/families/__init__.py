"""The supported model families: Hugging Face `config.json` -> `Architecture`, and the names of the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama, qwen2, qwen3

FAMILIES: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    "LlamaForCausalLM": llama.architecture,
    "Qwen2ForCausalLM": qwen2.architecture,
    "Qwen3ForCausalLM": qwen3.architecture,
}


def read_architecture(path: str) -> Architecture:
    """The architecture described by `path/config.json`.

    Raises:
        ValueError: no such file, unknown architecture (the supported ones are listed), or a missing field.
    """
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(f"actor_rollout_ref.model.path: no config.json in '{path}'")
    try:
        with open(file, encoding="utf-8") as f:
            config = json.load(f)
        names = config.get("architectures") or ["(none)"]
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as e:
        raise ValueError(f"'{file}' is not a JSON object: {e}") from e
    if names[0] not in FAMILIES:
        raise ValueError(f"'{file}': architecture {names[0]} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[names[0]](config)
    except KeyError as e:
        raise ValueError(f"'{file}': field {e} is missing") from e

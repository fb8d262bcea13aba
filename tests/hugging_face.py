"""Tiny models of `transformers` with our weights. Imports transformers: for the main process only."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from full_weights import random_weights
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_families import ARCHITECTURES, CONFIGS
from transformers import AutoModelForCausalLM


@cache
def hugging_face(name: str, seed: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a tiny config with `random_weights`, read from files as a published model is."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]))
        save_file(random_weights(ARCHITECTURES[name], seed), Path(folder, "model.safetensors"), {"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    assert not any(report.values()), report
    return model.eval()


def saved_shapes(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the files that `transformers` writes for a tiny config."""
    hugging_face(name).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)

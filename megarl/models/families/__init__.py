"""Holds the supported model families: Hugging Face `config.json` -> `Architecture`, and the names of the weights.

`docs/howto/model.md` says how to add one: a file here, a line in `FAMILIES`, a tiny config in `tests/tiny_families.py`.

A kind of attention or of MLP that is not among `megarl.models.parts` is one file there, which says all that is known of
it before a run, and one file in `megarl.rollout.native.parts`, which computes it while it generates. In training,
attention is computed by the module that its part names (`training_module`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import (
    deepseek_v3,
    gemma3_text,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    of_user,
    olmo2,
    qwen2,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
)

FAMILIES: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    "LlamaForCausalLM": llama.architecture,
    "MistralForCausalLM": mistral.architecture,
    "MixtralForCausalLM": mixtral.architecture,
    "Qwen2ForCausalLM": qwen2.architecture,
    "Qwen3ForCausalLM": qwen3.architecture,
    "Qwen3MoeForCausalLM": qwen3_moe.architecture,
    "Glm4MoeForCausalLM": glm4_moe.architecture,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.architecture,
    "DeepseekV3ForCausalLM": deepseek_v3.architecture,
    "Gemma3ForCausalLM": gemma3_text.architecture,
    "GptOssForCausalLM": gpt_oss.architecture,
    "Qwen3NextForCausalLM": qwen3_next.architecture,
    "Qwen3_5ForCausalLM": qwen3_5_text.architecture,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe_text.architecture,
    "Olmo2ForCausalLM": olmo2.architecture,
    "MiniMaxM2ForCausalLM": minimax_m2.architecture,
}

_WITH_IMAGES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""The language models in models with images."""

_CLASSIFIERS = {"Gemma3TextForSequenceClassification": "Gemma3ForCausalLM"}
"""The language models under sequence classifiers, where one is not named after the other."""


def language_model_of(architecture: str) -> str:
    """Name the language model under a sequence classifier; any other model is its own."""
    return _CLASSIFIERS.get(architecture) or architecture.replace("ForSequenceClassification", "ForCausalLM")


def classifier_of(architecture: str) -> str:
    """Name the sequence classifier on a language model."""
    named = {model: classifier for classifier, model in _CLASSIFIERS.items()}
    return named.get(architecture) or architecture.replace("ForCausalLM", "ForSequenceClassification")


def read_architecture(path: str) -> Architecture:
    """Read the architecture from `path/config.json`; of a sequence classifier, that of the language model under it.

    Raises:
        ValueError: no such file, unknown architecture (the supported ones are listed), or a missing field.
    """
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(f"actor_rollout_ref.model.path: no config.json in '{path}'")
    try:
        with open(file, encoding="utf-8") as f:
            config = json.load(f)
        names = list(config.get("architectures") or ["(none)"])
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as e:
        raise ValueError(f"'{file}' is not a JSON object: {e}") from e
    name = language_model_of(str(names[0]))
    if name in _WITH_IMAGES:
        raise ValueError(
            f"'{file}': {name} has images; save its language model, {_WITH_IMAGES[name]}, alone with transformers, as "
            f"docs/howto/model.md says"
        )
    if name not in FAMILIES and not of_user.is_named():
        raise ValueError(
            f"'{file}': architecture {names[0]} is not supported; supported: {', '.join(FAMILIES)}, or a family "
            f"of your own: actor_rollout_ref.model.family=path/to/file.py:function, or {of_user.VARIABLE}"
        )
    try:
        return FAMILIES.get(name, of_user.architecture)(config)
    except KeyError as e:
        raise ValueError(f"'{file}': field {e} is missing") from e
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError) as e:
        raise ValueError(f"'{file}': a field has a value of another kind than it should have: {e}") from e

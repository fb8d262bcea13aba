"""Reads fields of `config.json` that several families have."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from megarl.models.architecture import Layer

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def check_only(config: Mapping[str, Any], family: str, only: Mapping[str, Any]) -> None:
    """Raise ValueError if a field has another value than the only one that is supported.

    A field that is left out has it. So has one that is null, unless it must be true: transformers takes null for false.
    """
    for key, supported in only.items():
        value = config.get(key, supported)
        if value != supported and (value is not None or supported is True):
            raise ValueError(f"{family}: {key} = {value!r:.40} is not supported (only {supported!r})")


def check_not_quantized(config: Mapping[str, Any], family: str) -> None:
    """Raise ValueError if the weights are quantized."""
    if config.get("quantization_config"):
        raise ValueError(f"{family}: quantized weights are not supported: convert them to bfloat16 first")


def window_of(config: Mapping[str, Any], family: str) -> int:
    """Read how many tokens layers with a window see."""
    window: int | None = config["sliding_window"]
    if window is None:
        raise ValueError(f"{family}: sliding_window must be a number of tokens, not null")
    return window


def alternating(
    config: Mapping[str, Any], kinds: Mapping[str, Layer], count: int, *, every: str
) -> tuple[tuple[Layer, int], ...]:
    """Stack `count` layers of two kinds, as `layer_types` says, or with full attention in every n-th.

    Args:
        kinds: by their names in `layer_types`; one is full attention.
        every: the field that says n.
    """
    types, n = config.get("layer_types"), config[every]
    if types is None:
        if type(n) is not int or n < 1:
            raise ValueError(f"{every} must be a whole number from 1 on, not {n!r:.40}")
        (other,) = kinds.keys() - {FULL}
        types = [other if (i + 1) % n else FULL for i in range(count)]
    if len(types) != count or not set(types) <= kinds.keys():
        raise ValueError(f"layer_types must be {' or '.join(map(repr, kinds))} for each of the {count} layers")
    return tuple((kinds[kind], len(list(run))) for kind, run in groupby(types))

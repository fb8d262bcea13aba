"""Describes Llama 2 and 3 (arXiv 2307.09288, 2407.21783), the family of which the others are variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families.fields import check_only
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.rotary import RopeScaling, Yarn
from megarl.models.parts.swiglu import SwiGLU

Scaling = Callable[[dict[str, Any]], Any]
"""Reads how rotary frequencies are scaled; raises KeyError for a missing field."""

_OF_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SCALINGS: dict[str, Scaling] = {
    "default": lambda rope: None,
    "linear": lambda rope: RopeScaling(factor=rope["factor"]),
    "llama3": lambda rope: RopeScaling(**{name: rope[name] for name in _OF_LLAMA3}),
}
"""Rope types that change the frequencies alone."""


def yarn(rope: dict[str, Any]) -> Yarn:
    """Read YaRN's fields, as Qwen's and gpt-oss' models have them."""
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ValueError("mscale and mscale_all_dim of rope type 'yarn' are not supported")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor")
    return Yarn(**{name: rope[name] for name in names if name in names[:2] or rope.get(name) is not None})


WITH_YARN = SCALINGS | {"yarn": yarn}
"""Rope types of Llama-like families."""


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `LlamaConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    return model(config, "llama", layer(config, "llama"))


def model(config: dict[str, Any], family: str, kind: Layer) -> Architecture:
    """Stack layers of one kind under the fields that every Llama-like family shares."""
    return Architecture(
        family=family,
        layers=((kind, config["num_hidden_layers"]),),
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        output="tied" if config.get("tie_word_embeddings", False) else "lm",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        init_std=config.get("initializer_range", 0.02),
    )


def layer(config: dict[str, Any], family: str, *, partial_rotary: bool = False) -> Layer:
    """Read the layer that every Llama-like family shares.

    Args:
        partial_rotary: whether the family rotates a part of each head only.
    """
    check_only(config, family, {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False})
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(f"{family}: layer_types with {kind!r} is not supported (only 'full_attention')")
    heads = config["num_attention_heads"]
    attention = GroupedQuery(
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        **rope(config, family, WITH_YARN),
    )
    if attention.partial_rotary_factor != 1.0 and not partial_rotary:
        raise ValueError(
            f"{family}: partial_rotary_factor = {attention.partial_rotary_factor} is not supported (only 1.0)"
        )
    return Layer(attention=attention, mlp=SwiGLU(ffn_hidden_size=config["intermediate_size"]))


def rope(config: dict[str, Any], family: str, scalings: Mapping[str, Scaling] = SCALINGS) -> dict[str, Any]:
    """Read base and scaling: transformers 5 has both in `rope_parameters`, 4 has `rope_theta` and `rope_scaling`."""
    ropes = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    readings = [rope_of(rope, config, family, scalings) for rope in ropes or [{}]]
    if readings[0] != readings[-1]:  # transformers would take rope_scaling, and a base of its own
        raise ValueError(f"{family}: rope_parameters and rope_scaling say different things; leave one of them out")
    return readings[0]


def rope_of(
    rope: dict[str, Any], config: dict[str, Any], family: str, scalings: Mapping[str, Scaling] = SCALINGS
) -> dict[str, Any]:
    """Read one set of rotary parameters; what it leaves out is taken from `config`."""
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{family}: rope_parameters of their own for each kind of layer are not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in scalings:
        raise ValueError(f"{family}: rope type {kind!r} is not supported (only {', '.join(map(repr, scalings))})")
    return dict(
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
        rope_scaling=scalings[kind](rope),
        partial_rotary_factor=rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)),
    )

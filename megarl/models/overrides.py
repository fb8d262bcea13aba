"""Refuses fields of `override_transformer_config` that would break the model, or do nothing."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megarl.models.architecture import Architecture
from megarl.models.gpt import config_class, transformer_fields, with_kernels_here
from megarl.models.weight_gradient import enable_gradient_accumulation_fusion
from megarl.parallel.layout import TrainLayout

_KEY = "actor.megatron.override_transformer_config"
_FREE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "moe_permute_fusion")
"""Fields that `transformer_fields` sets, but that are anyone's to choose."""
_DECIDED = re.compile(
    r".*parallel_(size|sizes|layout)|.*_pipeline_stage|account_for_.*_in_pipeline_split|.*_dtype|fp16|enable_autocast"
    r"|moe_input_jitter_eps|moe_router_force_.*"
    r"|num_moe_experts|moe_(layer_freq|shared_.*|latent_size|router_(score_function|enable_expert_bias|.*_factor))"
    r"|mtp_.*|mamba_.*|linear_.*|dsa_.*|hetero.*|heter.*|is_hybrid_model|experimental_attention_variant"
    r"|multi_latent_attention|attention_output_gate|window_.*|softmax_(scale|type)|qk_(l2_norm|clip.*)|no_rope_freq"
    r"|rope_type|mscale.*|beta_.*|original_max_position_embeddings|cache_mla_latents"
    r"|rotary_.*|mrope_.*|layernorm_zero_centered_gamma|apply_residual_connection_post_layernorm|glu_linear_offset"
    r"|activation_func.*|transformer_impl|test_mode|.*_func|init_.*|embedding_init_.*|_.*"
)
"""Fields that `transformer_fields` leaves at Megatron-Core's default because the model or the layout needs that."""


def check_overrides(
    overrides: Mapping[str, Any],
    arch: Architecture,
    layout: TrainLayout,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: bool | Sequence[str],
) -> None:
    """Raise ValueError, naming the field, unless every override is one that Megatron-Core accepts and that is free."""
    fields = transformer_fields(
        arch,
        layout,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        on_gpu=torch.cuda.is_available(),
    )
    config = config_class(arch)
    hints, known = get_type_hints(config), {field.name for field in dataclasses.fields(config)}
    for name, value in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            suggestion = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"{_KEY}: Megatron-Core's TransformerConfig has no '{name}'{suggestion}")
        if name == "cp_comm_type":
            raise ValueError(f"{_KEY}.{name}: set actor.megatron.{name}")
        if name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            raise ValueError(
                f"{_KEY}.{name}: set actor.megatron.{name}, which is divided by all tokens of a mini-batch"
            )
        decided = (name in fields and name not in _FREE) or _DECIDED.fullmatch(name)
        if decided or (name.startswith("moe_") and arch.moe is None):
            raise ValueError(f"{_KEY}.{name}: the model and the layout decide it; leave it out")
        _check_type(name, hints[name], value)
    enable_gradient_accumulation_fusion()
    try:
        config(**fields | with_kernels_here(overrides))
    except Exception as e:  # Megatron-Core refuses by assertions, too
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        raise ValueError(f"{_KEY} = {dict(overrides)}: Megatron-Core refuses it: {reason}") from e


def _check_type(name: str, hint: Any, value: Any) -> None:
    try:
        TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as e:
        message = e.errors()[0]["msg"]
        raise ValueError(f"{_KEY}.{name}: {message[0].lower()}{message[1:]} (got {value!r:.80})") from e

"""Finds and checks checkpoints that Megatron-LM's own programs wrote, whose weights are taken here. Torch-free.

ROOT/latest_checkpointed_iteration.txt   100, or release
ROOT/iter_0000100/                       Megatron-Core's format "torch_dist"
    metadata.json, .metadata, __0_0.distcp, ...
    common.pt                            its arguments, which are compared with config.json
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.checkpoint.folder import STATE_FILE
from megarl.checkpoint.manifest import MANIFEST_FILE, one_line
from megarl.models.architecture import Architecture
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.rotary import RopeScaling, Yarn
from megarl.telemetry.lines import only_file

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "metadata.json"
_OF_ROUTERS = (
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
)
"""Arguments of Megatron-LM's that decide what routers choose, and what is computed beside the chosen."""
_OLD = re.compile(r"mp_rank_\d+(_\d+)*")


def newest_iteration(folder: str) -> str:
    """Return the checkpoint that a folder of Megatron-LM's names as its newest; any other folder as it is.

    Raises:
        ValueError: it names none that is there, in one line.
    """
    tracker = os.path.join(folder, TRACKER)
    if not os.path.isfile(tracker):
        return folder
    with open(tracker, "rb", opener=only_file) as f:
        text = f.read(64).decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,12}|release", text):
        raise ValueError(f"'{tracker}' names no iteration: {text!r}")
    newest = os.path.join(folder, text if text == "release" else f"iter_{int(text):07d}")
    if not os.path.isdir(newest):
        raise ValueError(f"'{tracker}' names {os.path.basename(newest)}, which is not there")
    return newest


def is_megatron_lm(folder: str) -> bool:
    """Say whether a folder is a checkpoint of Megatron-LM's, in whichever format; MegaRL's have files of their own."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if STATE_FILE in names or MANIFEST_FILE in names:
        return False
    return DESCRIPTION in names or any(map(_OLD.fullmatch, names))


def check_format(folder: str) -> None:
    """Raise ValueError for another format than "torch_dist", with what to do."""
    try:
        with open(os.path.join(folder, DESCRIPTION), "rb", opener=only_file) as f:
            description = json.load(f)
        backend = description["sharded_backend"]
    except FileNotFoundError:
        backend = "torch, which is pickled"
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as e:
        raise ValueError(f"'{folder}': {DESCRIPTION} cannot be read: {one_line(e)}") from e
    if backend != "torch_dist":
        raise ValueError(
            f"'{folder}' has Megatron-LM's format {str(backend)[:40]}; write it again as torch_dist, with its options "
            f"--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )


def check_arguments(folder: str, arch: Architecture) -> str | None:
    """Compare the arguments of the training with an architecture, as far as they decide what the weights compute.

    Returns:
        a remark if they could not be compared; None if they agree.

    Raises:
        ValueError: names the first that differs, or the attention's kind, of which no such checkpoint was read yet.
    """
    if arch.needs_torch_layers or not arch.fused_attention:
        raise ValueError(
            f"'{folder}' is Megatron-LM's, and of {arch.family} those are not read: take the weights from its "
            "Hugging Face folder"
        )
    from megarl.checkpoint.stored_arguments import read_arguments  # imports torch

    try:
        arguments = read_arguments(folder)
    except ValueError as e:
        return f"remark: '{folder}': {e}; its arguments are not compared with config.json"
    if not arguments:
        return f"remark: '{folder}' has no arguments of Megatron-LM's that config.json could be compared with"
    for name, expected in _expected(arch, arguments):
        value = arguments.get(name, expected)
        are_numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        if not (math.isclose(value, expected) if are_numbers else value == expected):
            raise ValueError(
                f"'{folder}' was trained with {name} = {str(value)[:80]}, and by config.json it is {expected}: take "
                f"the config.json of that model"
            )
    return None


def _expected(arch: Architecture, arguments: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield Megatron-LM's arguments with the values that the architecture needs."""
    yield "normalization", "RMSNorm"
    yield "apply_layernorm_1p", False
    yield "norm_epsilon", arch.norm_eps
    yield "num_layers", arch.num_layers
    yield "hidden_size", arch.hidden_size
    yield "swiglu", True
    yield "add_bias_linear", False
    yield "position_embedding_type", "rope"
    yield "rotary_interleaved", False
    yield "multi_latent_attention", False
    if arch.output != "scalar":
        yield "untie_embeddings_and_output_weights", arch.output == "lm"
    fields = {name: value for layer in arch.kinds for name, value in layer.megatron_fields().items()}
    names = ["num_attention_heads", "kv_channels", "add_qkv_bias", "qk_layernorm"]
    if grouped := arguments.get("group_query_attention"):
        names.append("num_query_groups")
    elif grouped is False:
        yield "group_query_attention", fields["num_query_groups"] != fields["num_attention_heads"]
    assert isinstance(arch.attention, GroupedQuery) and not isinstance(arch.attention.rope_scaling, Yarn)
    yield "rotary_base", arch.attention.rope_theta
    yield "rotary_percent", arch.attention.partial_rotary_factor
    yield from _expected_scaling(arch.attention.rope_scaling)
    yield "num_experts", fields.get("num_moe_experts")
    names += ["ffn_hidden_size", "moe_ffn_hidden_size", "moe_router_topk", *_OF_ROUTERS]
    for name in names:
        says_nothing = fields.get(name) is None and arguments.get(name) == 1  # one group, or a factor of 1
        if name in fields and not says_nothing:
            yield name, fields[name]


def _expected_scaling(scaling: RopeScaling | None) -> Iterator[tuple[str, Any]]:
    is_llama3 = scaling is not None and scaling.original_max_position_embeddings is not None
    yield "use_rope_scaling", is_llama3
    if scaling is not None and is_llama3:
        yield "rope_scaling_factor", scaling.factor
    yield "rotary_seq_len_interpolation_factor", 1 if scaling is None or is_llama3 else scaling.factor

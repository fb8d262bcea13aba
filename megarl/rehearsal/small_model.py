"""Shrinks the model of a config.json: the same family and kinds of layers, no wider than its layouts need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, language_model_of
from megarl.parallel.experts import TensorSplit

LEAST_WIDTH = 32
"""Of an MLP, an expert or a part of latent attention."""
LINEAR_HEAD_DIM = 8
MOST_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
)
HEAD_DIMS = (8, 16, 32, 64, 80, 96, 112, 128)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Says into how many parts layouts cut a model.

    Attributes:
        tensor: tensor-parallel sizes, of training, of its experts and of generation.
        heads: `TrainLayout.head_splits` of each layout.
        chunks: parts of the pipeline, at most; None: keys say how many layers each has, so all layers stay.
        sequence_parallel: whether a layout splits norms along the sequence.
        experts: parts into which the experts are dealt out, over all layouts.
    """

    tensor: frozenset[int]
    chunks: int | None
    sequence_parallel: bool
    experts: int = 1
    heads: frozenset[tuple[int, int]] = frozenset()


def small_config(
    config: Mapping[str, Any], splits: Splits, vocab_size: int | None, serves: Callable[[Architecture], bool]
) -> dict[str, Any]:
    """Shrink a model; heads divide, or are shared, over the tensor-parallel ranks as those of the real one are.

    Llama-3-70B for TP8 x PP4: 4 layers instead of 80, 16 heads of width 8 in 8 groups instead of 64 of width 128.

    Args:
        config: the fields of config.json.
        vocab_size: of the small model; None: the real one's.
        serves: says whether the engine can generate with a model.

    Raises:
        ValueError: no model of this family is small and fits the layouts.
    """
    small = {**config, "num_hidden_layers": _layers(config["num_hidden_layers"], splits.chunks)}
    width = math.lcm(*splits.tensor)
    width *= -(-LEAST_WIDTH // width)
    small |= {name: width for name in _WIDTHS if small.get(name)}
    if "qk_rope_head_dim" in small:
        small["qk_rope_head_dim"] = 2 * width  # its channels turn in pairs
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in small:
            small[name] = min(small[name], splits.experts * -(-MOST_EXPERTS // splits.experts))
    if small.get("n_group", 1) > 1:
        small |= {"n_group": 2, "topk_group": 1}
    if small.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    if "num_experts_per_tok" in small:
        small["num_experts_per_tok"] = min(small["num_experts_per_tok"], EXPERTS_PER_TOKEN)
    if small.get("layer_types"):
        small["layer_types"] = _some_of_each(small["layer_types"], small["num_hidden_layers"])
    small |= {name: 2 for name in ("sliding_window_pattern", "full_attention_interval") if name in small}
    if "linear_num_key_heads" in small:
        heads, per_key = math.lcm(*splits.tensor), small["linear_num_value_heads"] // small["linear_num_key_heads"]
        small |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * per_key}
        small |= {"linear_key_head_dim": LINEAR_HEAD_DIM, "linear_value_head_dim": LINEAR_HEAD_DIM}
    if vocab_size is not None:  # the tokens that the files name are another tokenizer's
        small |= {"vocab_size": vocab_size, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
    return _with_heads(small, splits, serves)


def _some_of_each(types: list[str], count: int) -> list[str]:
    """Take the first layers, the last of them of the kind that the others are not, if the model has two."""
    first = types[:count]
    others = [kind for kind in types if kind not in first]
    return [*first[:-1], others[0]] if others else first


def _layers(layers: int, chunks: int | None) -> int:
    """Count 2 layers, or as few as there are chunks, and one more where chunks of the real model differ by a layer."""
    if chunks is None:
        return layers
    return min(layers, max(2, chunks + (layers % chunks > 0)))


def _with_heads(config: Mapping[str, Any], splits: Splits, serves: Callable[[Architecture], bool]) -> dict[str, Any]:
    """Give the model heads that every layout can split, the fewest and narrowest."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    queries = heads // groups
    choices = product(_divisors(groups), _divisors(queries, least=min(2, queries)), HEAD_DIMS)
    for few_groups, few_queries, width in sorted(choices, key=math.prod):
        if any(_sharing(few_groups, tp) != _sharing(groups, tp) for tp in splits.tensor):
            continue
        small = {
            **config,
            "num_attention_heads": few_groups * few_queries,
            "num_key_value_heads": few_groups,
            "head_dim": width,
            "hidden_size": few_groups * few_queries * width,
        }
        arch = FAMILIES[language_model_of(config["architectures"][0])](small)
        if _fits(arch, splits) and serves(arch):
            return small
    sizes = [f"tensor-parallel sizes {sorted(splits.tensor)}"]
    if any(cp > 1 for _, cp in splits.heads):
        sizes.append(f"context-parallel sizes {sorted({cp for _, cp in splits.heads})}")
    raise ValueError(f"no small model has heads for {' and '.join(sizes)}")


def _sharing(groups: int, tp: int) -> tuple[bool, int]:
    """Say whether the KV heads divide over the ranks, and how many ranks share one."""
    return groups % tp == 0, max(1, tp // groups)


def _fits(arch: Architecture, splits: Splits) -> bool:
    try:
        for tp, cp in (*splits.heads, *((tp, 1) for tp in splits.tensor)):
            arch.check_training(arch.one_copy(tp=tp, cp=cp), sequence_parallel=splits.sequence_parallel)
            arch.check_generation(TensorSplit(tp=tp))
    except ValueError:
        return False
    return True


def _divisors(number: int, least: int = 1) -> list[int]:
    return [i for i in range(least, number + 1) if number % i == 0]

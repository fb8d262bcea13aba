"""What vLLM's own loaders put into its parameters: their rules, not our table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.models.parts.experts import MixtureOfExperts


def wanted_by_vllm(
    name: str,
    p: Tensor,
    full: dict[str, Tensor],
    tp: int,
    r: int,
    moe: MixtureOfExperts | None = None,
    *,
    whole_experts: bool = False,
) -> Tensor:
    """Contents of parameter `name` on rank `r` of `tp`, from whole Hugging Face tensors. Padding rows are `p`'s own."""

    def shard(name: str, dim: int) -> Tensor:
        return full[name].chunk(tp, dim)[r]

    if moe and ".experts." in name:
        if whole_experts:
            mine = range(moe.num_experts)[r * moe.num_experts // tp : (r + 1) * moe.num_experts // tp]
            return _experts(name, moe, mine, lambda name, dim: full[name])
        return _experts(name, moe, range(moe.num_experts), shard)
    if "qkv_proj" in name:
        return torch.cat([shard(name.replace("qkv", x), 0) for x in "qkv"])
    if "gate_up_proj" in name:
        return torch.cat([shard(name.replace("gate_up", x), 0) for x in ("gate", "up")])
    if "o_proj" in name or "down_proj" in name:
        return shard(name, 1)
    if "embed_tokens" in name or "lm_head" in name:
        mine = full[name][r * len(p) : (r + 1) * len(p)]
        return torch.cat([mine.to(p), p[len(mine) :]])
    return full[name]


def _experts(name: str, moe: MixtureOfExperts, mine: range, shard: Callable[[str, int], Tensor]) -> Tensor:
    block = name.split(".experts.")[0]

    def expert(i: int, leaf: str, dim: int) -> Tensor:
        return shard(f"{block}.experts.{i}.{leaf}.weight", dim)

    if name.endswith("w2_weight"):
        return torch.stack([expert(i, moe.down_proj, 1) for i in mine])
    assert name.endswith("w13_weight")
    pairs = [[expert(i, leaf, 0) for leaf in (moe.gate_proj, moe.up_proj)] for i in mine]
    return torch.stack([torch.cat(pair) for pair in pairs])

"""Chooses the number of KV cache blocks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.host import cpu_rank_memory
from megarl.models.architecture import Architecture
from megarl.models.sizes import (
    BLOCK_SIZE,
    blocks_for,
    kv_bytes_per_token,
    most_blocks,
    native_activation_bytes,
    routed_bytes_per_token,
    state_bytes,
)
from megarl.parallel.experts import TensorSplit


def cache_blocks(
    arch: Architecture,
    split: TensorSplit,
    *,
    tp_group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    weight_bytes: int,
    gpu_memory_utilization: float,
    records_routing: bool = False,
) -> int:
    """Count the blocks that all sequences can fill, or that memory allows; the same on all ranks of a replica.

    Args:
        split: how the replica's ranks divide layers.
        weight_bytes: the engine's own weights on this rank, which are held already.
        gpu_memory_utilization: part of the GPU's memory for weights, activations and KV cache of the engine, less where
            other programs leave less; on a CPU rank, part of its share of the machine's memory.
        records_routing: the cache has the experts of its tokens, too.

    Raises:
        ValueError: there is no room for one sequence of `max_model_len` tokens.
    """
    useful = most_blocks(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    if device.type == "cuda":
        # torch can seldom give its reserve out in blocks as large as the cache's
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    else:
        free = total = cpu_rank_memory()
    activations = native_activation_bytes(
        arch,
        split,
        itemsize=dtype.itemsize,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    states = state_bytes(arch, tp=split.tp, max_num_seqs=max_num_seqs)
    room = min(gpu_memory_utilization * total - weight_bytes, free) - activations - states
    token_bytes = kv_bytes_per_token(arch, tp=split.tp, itemsize=dtype.itemsize)
    block_bytes = BLOCK_SIZE * (token_bytes + (routed_bytes_per_token(arch) if records_routing else 0))
    blocks = min(useful, int(room // block_bytes))
    if tp_group is not None:
        fewest = torch.tensor(blocks, device=device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=tp_group)
        blocks = int(fewest)
    if blocks < blocks_for(max_model_len) + 1:
        raise ValueError(
            f"the KV cache has room for {max(blocks - 1, 0) * BLOCK_SIZE} tokens, fewer than one sequence of "
            f"max_model_len = {max_model_len}: raise rollout.gpu_memory_utilization, or shorten prompts and responses"
            + (f", or lower rollout.max_num_seqs, whose states take {states / 2**30:.1f} GiB" if states else "")
        )
    return blocks

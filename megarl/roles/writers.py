"""Which rank writes which parameter of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase

from megarl.data.balance import karmarkar_karp


def parameters_in(weights: dict[str, Any]) -> Iterator[Any]:
    """Sharded tensors (or their factories) of parameters, in the order of the state dict."""
    for value in nested_values(weights):
        if isinstance(value, ShardedBase) and isinstance(value.data, torch.nn.Parameter):
            yield value


def spread_over_replicas(weights: dict[str, Any], data_parallel: dist.ProcessGroup) -> dict[str, Any]:
    """Which data-parallel rank writes which parameter: shares of nearly equal size instead of all with the first.

    Megatron-Core's `replica_id` is (pipeline, tensor, data) and (0, 0, 0) writes. Of 4 data-parallel ranks, rank 2 may
    write a parameter: on ranks 0 to 3 its last number is then 2, 3, 0, 1 here.

    Args:
        weights: sharded state dict of the model, the same parameters in the same order on all these ranks.
    """
    written = [weight for weight in parameters_in(weights) if not any(weight.replica_id[:-1])]
    sizes = [weight.data.numel() for weight in written]
    shares = karmarkar_karp(sizes, range(len(sizes)), data_parallel.size())
    writer = {id(written[i]): rank for rank, share in enumerate(shares) for i in share}

    def assign(value: Any) -> Any:
        if id(value) not in writer:
            return value
        replica = (data_parallel.rank() - writer[id(value)]) % data_parallel.size()
        return replace(value, replica_id=(*value.replica_id[:-1], replica))

    spread: dict[str, Any] = dict_list_map_outplace(assign, weights)
    return spread

"""Decides which rank writes which parameter of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.data.balance import karmarkar_karp


def parameters_in(weights: dict[str, Any]) -> Iterator[Any]:
    """Yield the sharded tensors (or their factories) of parameters, in the order of the state dict."""
    for value in nested_values(weights):
        if isinstance(value, ShardedBase) and isinstance(value.data, torch.nn.Parameter):
            yield value


def replicas_of(parameter: torch.Tensor, groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """Return the ranks with a parameter: all data-parallel ones, or fewer of an expert where these split experts."""
    # the mark by which Megatron-Core knows an expert that other data-parallel ranks lack
    return groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp


def spread_over_replicas(weights: dict[str, Any], groups: ProcessGroupCollection) -> dict[str, Any]:
    """Let the ranks that hold the same parameters write shares of nearly equal size, instead of the first one all.

    Megatron-Core's `replica_id` is (pipeline, tensor, data) and (0, 0, 0) writes. Of 4 data-parallel ranks, rank 2 may
    write a parameter: on ranks 0 to 3 its last number is then 2, 3, 0, 1 here.

    Args:
        weights: sharded state dict of the model, the same parameters in the same order on all these ranks.
        groups: of the model's layout.
    """
    parameters: dict[dist.ProcessGroup, list[Any]] = {}
    for weight in parameters_in(weights):
        if not any(weight.replica_id[:-1]):
            parameters.setdefault(replicas_of(weight.data, groups), []).append(weight)
    replicas: dict[int, int] = {}
    for group, members in parameters.items():
        shares = karmarkar_karp([weight.data.numel() for weight in members], range(len(members)), group.size())
        for writer, share in enumerate(shares):
            replicas |= {id(members[i]): (group.rank() - writer) % group.size() for i in share}

    def assign(value: Any) -> Any:
        if id(value) not in replicas:
            return value
        return replace(value, replica_id=(*value.replica_id[:-1], replicas[id(value)]))

    spread: dict[str, Any] = dict_list_map_outplace(assign, weights)
    return spread

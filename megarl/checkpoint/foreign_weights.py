"""Reads a rank's weights from a checkpoint of Megatron-LM's, whatever layout wrote it."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.planner import LoadPlan

from megarl.checkpoint.manifest import one_line
from megarl.checkpoint.rank_failures import first_of
from megarl.checkpoint.sharded_files import Reads
from megarl.checkpoint.stored_names import all_as_stored, shape_problem
from megarl.checkpoint.stored_objects import CheckpointReader
from megarl.parallel.world import World


def load_foreign_weights(folder: str, sharded: dict[str, Any], world: World) -> dict[str, Any]:
    """Read the weights of a sharded state dict, and nothing else of the checkpoint. Every rank calls it.

    Args:
        sharded: of weights alone.

    Returns:
        the state dict to load from.

    Raises:
        ValueError: on every rank, in one line, if a tensor is missing or has another shape, or a file is damaged.
    """
    loaded: dict[str, Any] = {}
    problem = None
    try:
        loaded = _read(CheckpointReader(folder), sharded)
    except Exception as e:  # whatever reading a damaged file raises
        problem = one_line(e)
    if (problem := first_of(world, problem)) is not None:
        raise ValueError(f"checkpoint '{folder}': {problem}")
    return loaded


def _read(reader: CheckpointReader, sharded: dict[str, Any]) -> dict[str, Any]:
    parts, _, factories = load_preprocess(sharded)
    parts, _ = extract_sharded_base(parts)
    placed = all_as_stored(parts, reader.stored)
    planner = Reads(reader)
    for part in nested_values(placed):
        if isinstance(part, ShardedTensor) and (problem := shape_problem(part, reader.stored.get(part.key))):
            raise ValueError(problem)
        planner.add(part)
    reader.read_data(LoadPlan(planner.items), planner).wait()
    return dict(apply_factory_merges(dict_list_map_outplace(planner.value, placed), factories))

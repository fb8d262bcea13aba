"""The ranks of a job write their parts of a sharded state dict, each with threads of its own.

The files are those of Megatron-Core's `dist_checkpointing` (format "torch_dist"). Its own writer starts a process that
imports torch anew, which takes seconds at the first save and outlives a rank that fails; and it would not say that the
disk is full to the ranks that are not concerned.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.agreement import on_every_rank
from megarl.checkpoint.write_items import object_bytes, object_item, stored_shape, tensor_item
from megarl.data.balance import karmarkar_karp

FILES_PER_RANK = 4
"""At most; each has a thread of its own."""

FILE_BYTES = 2**26
"""A rank with less than this writes one file."""


def write_sharded(folder: str, sharded: dict[str, Any], control: dist.ProcessGroup) -> None:
    """Write what each rank has to write into an existing, empty folder. Every rank calls it.

    A thread holds one tensor in host memory at a time.

    Args:
        control: all ranks, over gloo.

    Raises:
        RankFailed: on all ranks, if one cannot write its part.
    """
    parts, common = save_preprocess(sharded)  # checks that the ranks' parts cover every tensor exactly once
    planner = _Planner([part for part in nested_values(parts) if is_main_replica(part.replica_id)])
    everyone: list[list[WriteItem]] = [[] for _ in range(dist.get_world_size(control))]
    first = dist.get_rank(control) == 0
    dist.gather_object(planner.items, everyone if first else None, dst=0, group=control)
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(first)
    written = on_every_rank(control, lambda: _write_part(writer, planner, dist.get_rank(control)))
    results: list[list[WriteResult]] = [[] for _ in everyone]
    dist.gather_object(written, results if first else None, dst=0, group=control)

    def finish() -> None:
        if first:
            write_common(folder, common)
            _, metadata = planner.create_global_plan([SavePlan(items) for items in everyone])
            writer.finish(metadata, results)
            save_config(CheckpointingConfig("torch_dist"), folder)

    on_every_rank(control, finish)


def write_common(folder: str, common: dict[str, Any]) -> None:
    """What is not cut up. Raises OSError, which torch's own writing to a path would not, on a full disk, say."""
    stream = io.BytesIO()
    torch.save(common, stream)
    with open(os.path.join(folder, "common.pt"), "wb") as f:
        f.write(stream.getbuffer())


def _write_part(writer: FileSystemWriter, planner: _Planner, rank: int) -> list[WriteResult]:
    """One rank's items, spread over its files by size."""
    sizes = [planner.nbytes(item) for item in planner.items]
    files = min(FILES_PER_RANK, 1 + sum(sizes) // FILE_BYTES)
    parts = [part for part in karmarkar_karp(sizes, range(len(sizes)), files) if part]
    plans = [SavePlan([]) for _ in range(rank * FILES_PER_RANK)]  # the writer names files by the place in this list
    plans += [SavePlan([planner.items[i] for i in part]) for part in parts]
    mine = writer.prepare_global_plan(plans)[rank * FILES_PER_RANK :]
    with ThreadPoolExecutor(FILES_PER_RANK) as pool:
        # the writer's own threads would keep an error to themselves
        written = pool.map(lambda plan: writer.write_data(plan, planner).wait(), mine)
        return [result for results in written for result in results]


class _Planner(DefaultSavePlanner):
    """Gives the writer the data of this rank's items."""

    def __init__(self, parts: Sequence[ShardedTensor | ShardedObject]) -> None:
        super().__init__(flatten_state_dict=False)
        self.items: list[WriteItem] = []
        self._parts: dict[MetadataIndex, ShardedTensor | ShardedObject] = {}
        for part in parts:
            item = object_item(part.unique_key) if isinstance(part, ShardedObject) else tensor_item(part)
            self.items.append(item)
            self._parts[item.index] = part

    def nbytes(self, item: WriteItem) -> int:
        """0 for an object, which is small."""
        part = self._parts[item.index]
        return 0 if isinstance(part, ShardedObject) else int(part.data.nbytes)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        part = self._parts[write_item.index]
        if isinstance(part, ShardedObject):
            return object_bytes(part)
        return part.data.detach().view(stored_shape(part))

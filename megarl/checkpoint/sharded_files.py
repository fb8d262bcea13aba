"""The ranks of a job write their parts of a sharded state dict, each with threads of its own, and read theirs.

The files are those of Megatron-Core's `dist_checkpointing` (format "torch_dist"). Its own writer starts a process that
imports torch anew, which takes seconds at the first save and outlives a rank that fails; and it would not say that the
disk is full to the ranks that are not concerned. Its own reader runs what a stranger has pickled into a checkpoint.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.agreement import on_every_rank
from megarl.checkpoint.plan_items import (
    chunk_index,
    object_bytes,
    object_item,
    object_to_read,
    parts_to_read,
    place_in,
    stored_shape,
    tensor_item,
)
from megarl.checkpoint.stored_objects import COMMON_FILE, CheckpointReader, read_common, read_object
from megarl.data.balance import karmarkar_karp
from megarl.parallel.world import World

FILES_PER_RANK = 4
"""At most; each has a thread of its own."""

FILE_BYTES = 2**26
"""A rank with less than this writes one file."""


def write_sharded(folder: str, sharded: dict[str, Any], world: World) -> None:
    """Write what each rank has to write into an existing, empty folder. Every rank calls it.

    A thread holds one tensor in host memory at a time.

    Args:

    Raises:
        RankFailed: on all ranks, if one cannot write its part.
    """
    parts, common = save_preprocess(sharded)  # checks that the ranks' parts cover every tensor exactly once
    planner = _Planner([part for part in nested_values(parts) if is_main_replica(part.replica_id)])
    first = world.rank == 0
    everyone = world.gather(planner.items, "the plan of a checkpoint")
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(first)
    written = on_every_rank(world, lambda: _write_part(writer, planner, world.rank))
    results = world.gather(written, "all parts of a checkpoint")

    def finish() -> None:
        if first:
            write_common(folder, common)
            _, metadata = planner.create_global_plan([SavePlan(items) for items in everyone])
            writer.finish(metadata, results)
            save_config(CheckpointingConfig("torch_dist"), folder)

    on_every_rank(world, finish)


def difference(reader: CheckpointReader, sharded: dict[str, Any]) -> str | None:
    """The first tensor or object that this rank wants and that the checkpoint has not, or has in another shape."""
    for wanted in nested_values(load_preprocess(sharded)[0]):
        if isinstance(wanted, ShardedObject):
            if not _stays(wanted) and wanted.unique_key not in reader.stored:
                return f"it has no {wanted.unique_key}, which this run needs"
        elif isinstance(wanted, ShardedTensor):
            found = reader.stored.get(wanted.key)
            shape = list(wanted.global_shape)
            if not isinstance(found, TensorStorageMetadata):
                return f"it has no {wanted.key}, which this run needs with shape {shape}"
            if list(found.size) != shape and not wanted.allow_shape_mismatch:
                return f"its {wanted.key} has shape {list(found.size)}, this run's has {shape}"
    return None


def read_sharded(folder: str, reader: CheckpointReader, sharded: dict[str, Any]) -> dict[str, Any]:
    """Read this rank's part into the tensors of a sharded state dict in which there is no `difference`.

    Returns:
        the state dict, with what is not cut up.

    Raises:
        ValueError: in one line, if something would run code, or is damaged.
    """
    wanted, plain, factories = load_preprocess(sharded)
    wanted, _ = extract_sharded_base(wanted)
    planner = _Reads(reader)
    for part in nested_values(wanted):
        planner.add(part)
    reader.read_data(LoadPlan(planner.items), planner).wait()
    state = merge(merge(read_common(folder), plain), dict_list_map_outplace(planner.value, wanted))
    return dict(apply_factory_merges(state, factories))


def write_common(folder: str, common: dict[str, Any]) -> None:
    """What is not cut up. Raises OSError, which torch's own writing to a path would not, on a full disk, say."""
    stream = io.BytesIO()
    torch.save(common, stream)
    with open(os.path.join(folder, COMMON_FILE), "wb") as f:
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


class _Reads(DefaultLoadPlanner):
    """Tells the reader where what it reads belongs, and keeps it."""

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__()
        self.items: list[ReadItem] = []
        self._reader = reader
        self._targets: dict[MetadataIndex, list[Tensor]] = {}  # a rank may want the same part twice
        self._objects: dict[str, Any] = {}

    def add(self, part: ShardedBase) -> None:
        """Have it read, too."""
        if isinstance(part, ShardedObject):
            if not _stays(part):
                self.items.append(object_to_read(part.unique_key))
            return
        assert isinstance(part, ShardedTensor)
        if part.data is None:
            part.init_data("cpu")
        index = chunk_index(part)
        if index not in self._targets:
            stored = self._reader.stored[part.key]
            assert isinstance(stored, TensorStorageMetadata)
            self.items += parts_to_read(part, stored)
        self._targets.setdefault(index, []).append(part.data.detach().view(stored_shape(part)))

    def value(self, part: ShardedTensor | ShardedObject) -> Any:
        """What was read."""
        if isinstance(part, ShardedTensor) or _stays(part):
            return part.data
        return self._objects[part.unique_key]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return place_in(self._targets[read_item.dest_index][0], read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        for other in self._targets[read_item.dest_index][1:]:
            place_in(other, read_item).copy_(tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        stored = read_object(value, key)
        if not isinstance(stored, list) or len(stored) != 1:
            raise ValueError(f"{key} cannot be read: it is no object of Megatron-Core's")
        self._objects[key] = stored[0]


def _stays(part: ShardedObject) -> bool:
    """Whether an object is not read: the extra states of Transformer Engine's layers are for FP8 alone, and its layers
    would unpickle them, whatever they are."""
    return part.key.endswith("._extra_state")

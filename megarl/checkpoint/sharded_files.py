"""Writes each rank's parts of a sharded state dict on threads of its own, and reads the parts that a rank needs.

The files are those of Megatron-Core's `dist_checkpointing` (format "torch_dist"). Megatron-Core's writer starts a
process that imports torch anew, which takes seconds at the first save and outlives a rank that fails; and a full disk
on one rank would not reach the other ranks. Megatron-Core's reader runs code that a stranger pickled into a checkpoint.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, diff, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.bit_sums import bit_sums, total_of
from megarl.checkpoint.manifest import FileRecord, one_line, record_files
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
from megarl.checkpoint.recorded_files import RecordingWriter
from megarl.checkpoint.staging import Staging
from megarl.checkpoint.stored_names import all_as_stored
from megarl.checkpoint.stored_objects import COMMON_FILE, CheckpointReader, read_common, read_object
from megarl.data.balance import karmarkar_karp
from megarl.parallel.world import World

FILES_PER_RANK = 4
"""At most; each has a thread of its own."""

_DESCRIPTIONS = (COMMON_FILE, ".metadata", "metadata.json")

FILE_BYTES = 2**26
"""A rank with less than this writes one file."""


class ShardedParts:
    """Holds this rank's share of a sharded state dict. The ranks plan the shares together; each writes on any thread.

    Without a staging nothing is copied: the tensors of models and optimizers must not change before `write` returns. A
    thread holds one tensor in host memory at a time then.

    Attributes:
        rank: the one whose share it is.
        copied: whether everything is a copy.
        records: of the files that this rank has written, by name.
        bits: the whole tensors' sums, see `bit_sums`, as they were before they were copied; known to the first rank.
    """

    def __init__(self, sharded: dict[str, Any], world: World, staging: Staging | None = None) -> None:
        """Plan the shares. Every rank calls it.

        Args:
            staging: takes a copy of everything, if the host has the memory.
        """
        parts, self._common = save_preprocess(sharded, validate_access_integrity=False)
        mine = [part for part in nested_values(parts) if is_main_replica(part.replica_id)]
        tensors, self.copied = [part for part in mine if isinstance(part, ShardedTensor)], False
        if staging is not None:
            with suppress(MemoryError):
                self._common, mine, self.copied = copy.deepcopy(self._common), _copied(mine, staging), True
        try:  # all of this runs while the tensors are copied; what waits for the device, for all copies, comes last
            self._planner = _Planner(mine)
            descriptions = [part.without_data() for part in nested_values(parts)]
            everyone = world.gather((self._planner.items, descriptions, self._common), "the plan of a checkpoint")
            self._plans = [items for items, _, _ in everyone]
            problem = _problem([of_rank[1:] for of_rank in everyone]) if everyone else None
            if problem := world.broadcast(problem, "the plan of a checkpoint"):
                raise RuntimeError(f"the ranks do not have a checkpoint between them: {problem}")
            bits = bit_sums(tensors)
        finally:
            if staging is not None:
                staging.wait()
        self.bits = total_of(world.gather(bits, "the bits of a checkpoint"))
        self.rank = world.rank
        self.records: dict[str, FileRecord] = {}

    def write(self, folder: str) -> list[WriteResult]:
        """Write this rank's part into an existing folder, to the disk; waits for no other rank. Raises OSError."""
        if self.rank == 0:
            write_common(folder, self._common)
            self.records |= record_files(folder, [COMMON_FILE], sync=True)
        planner, first = self._planner, self.rank * FILES_PER_RANK
        sizes = [planner.nbytes(item) for item in planner.items]
        files = min(FILES_PER_RANK, 1 + sum(sizes) // FILE_BYTES)
        shares = [share for share in karmarkar_karp(sizes, range(len(sizes)), files) if share]
        plans = [SavePlan([]) for _ in range(first)]  # the writer names files by the place in this list
        plans += [SavePlan([planner.items[i] for i in share]) for share in shares]
        writer = RecordingWriter(folder)
        plans = writer.prepare_global_plan(plans)[first:]
        with ThreadPoolExecutor(FILES_PER_RANK) as pool:
            # the writer's own threads would keep an error to themselves
            by_file = pool.map(lambda plan: writer.write_data(plan, planner).wait(), plans)
            results = [result for of_file in by_file for result in of_file]
        self.records |= writer.records
        return results

    def finish(self, folder: str, results: list[list[WriteResult]]) -> None:
        """Write the description of all parts; the first rank calls it. Raises OSError.

        Args:
            results: of each rank's `write`, in rank order.
        """
        _, metadata = self._planner.create_global_plan([SavePlan(items) for items in self._plans])
        FileSystemWriter(folder).finish(metadata, results)
        save_config(CheckpointingConfig("torch_dist"), folder)


def _problem(of_ranks: Sequence[tuple[list[ShardedBase], dict[str, Any]]]) -> str | None:
    """Say why the ranks' parts are no checkpoint: each element is there once, and common values are the same."""
    try:
        for rank, (_, common) in enumerate(of_ranks):
            differ = [str(key) for keys in diff(of_ranks[0][1], common) for key in keys]
            if differ:
                return f"rank {rank} has other common values than the first ({', '.join(differ[:3])})"
        validate_sharding_integrity([parts for parts, _ in of_ranks])
    except (CheckpointingException, AssertionError) as e:  # Megatron-Core refuses by assertions, too
        return one_line(e) or type(e).__name__
    return None


def difference(reader: CheckpointReader, sharded: dict[str, Any]) -> str | None:
    """Name the first tensor or object of this rank that the checkpoint lacks, or has in another shape."""
    for part in nested_values(all_as_stored(load_preprocess(sharded)[0], reader.stored)):
        if isinstance(part, ShardedObject):
            if not _stays(part) and part.unique_key not in reader.stored:
                return f"it has no {part.unique_key}, which this run needs"
        elif isinstance(part, ShardedTensor):
            stored = reader.stored.get(part.key)
            shape = list(part.global_shape)
            if not isinstance(stored, TensorStorageMetadata):
                return f"it has no {part.key}, which this run needs with shape {shape}"
            if list(stored.size) != shape and not part.allow_shape_mismatch:
                return f"its {part.key} has shape {list(stored.size)}, this run's has {shape}"
    return None


def read_sharded(
    folder: str, reader: CheckpointReader, sharded: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Read this rank's parts into the tensors of a sharded state dict in which there is no `difference`.

    Returns:
        the state dict, with the common values, which no rank cuts up; and the `bit_sums` of what was read, of those
        tensors that have the stored shape, each replica's part counted once.

    Raises:
        ValueError: in one line, if a file would run code, or is damaged.
    """
    parts, plain, factories = load_preprocess(sharded)
    parts, _ = extract_sharded_base(parts)
    parts = all_as_stored(parts, reader.stored)
    planner = Reads(reader)
    for part in nested_values(parts):
        planner.add(part)
    reader.read_data(LoadPlan(planner.items), planner).wait()
    tensors = [part for part in nested_values(parts) if isinstance(part, ShardedTensor)]
    bits = bit_sums(part for part in tensors if is_main_replica(part.replica_id) and reader.has_shape_of(part))
    state = merge(merge(read_common(folder), plain), dict_list_map_outplace(planner.value, parts))
    return dict(apply_factory_merges(state, factories)), bits


def write_common(folder: str, common: dict[str, Any]) -> None:
    """Write the values that no rank cuts up. Raises OSError on a full disk, where torch.save to a path would not."""
    stream = io.BytesIO()
    torch.save(common, stream)
    with open(os.path.join(folder, COMMON_FILE), "wb") as f:
        f.write(stream.getbuffer())


def remove_parts(folder: str) -> None:
    """Delete all that `ShardedParts` has written into a folder. Raises OSError."""
    for name in os.listdir(folder):
        if name.endswith(DEFAULT_SUFFIX) or name in _DESCRIPTIONS:
            os.unlink(os.path.join(folder, name))


def _copied(parts: Sequence[ShardedTensor | ShardedObject], staging: Staging) -> list[ShardedTensor | ShardedObject]:
    tensors = iter(staging.copy(part.data for part in parts if isinstance(part, ShardedTensor)))
    return [replace(part, data=next(tensors)) if isinstance(part, ShardedTensor) else part for part in parts]


class _Planner(DefaultSavePlanner):
    """Lists this rank's items, and gives the writer their data. Objects are serialised at once."""

    def __init__(self, parts: Sequence[ShardedTensor | ShardedObject]) -> None:
        super().__init__(flatten_state_dict=False)
        self.items: list[WriteItem] = []
        self._data: dict[MetadataIndex, Tensor | io.BytesIO] = {}
        for part in parts:
            is_object = isinstance(part, ShardedObject)
            item = object_item(part.unique_key) if is_object else tensor_item(part)
            self.items.append(item)
            self._data[item.index] = object_bytes(part) if is_object else part.data.detach().view(stored_shape(part))

    def nbytes(self, item: WriteItem) -> int:
        """Count the bytes of an item; 0 for an object, which is small."""
        data = self._data[item.index]
        return data.nbytes if isinstance(data, Tensor) else 0

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._data[write_item.index]


class Reads(DefaultLoadPlanner):
    """Tells the reader where each item belongs, and keeps the objects that it reads."""

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__()
        self.items: list[ReadItem] = []
        self._reader = reader
        self._targets: dict[MetadataIndex, list[Tensor]] = {}  # a rank may want the same part twice
        self._objects: dict[str, Any] = {}

    def add(self, part: ShardedBase) -> None:
        """Ask the reader for a part."""
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
        """Take a part's value after reading."""
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
    """Say whether an object is left unread: extra states of Transformer Engine's layers are for FP8 alone, and the
    layers would unpickle anything."""
    return part.key.endswith("._extra_state")

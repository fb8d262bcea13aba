"""Turns Megatron-Core's sharded tensors and objects into items of a `torch.distributed.checkpoint` plan."""

from __future__ import annotations

import io

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


def tensor_item(chunk: ShardedTensor) -> WriteItem:
    """Plan to write a sharded tensor."""
    assert chunk.data is not None
    data = TensorWriteData(
        chunk=chunk_metadata(chunk),
        properties=TensorProperties.create_from_tensor(chunk.data.detach()),
        size=torch.Size(chunk.global_shape),
    )
    return WriteItem(index=chunk_index(chunk), type=WriteItemType.SHARD, tensor_data=data)


def object_item(key: str) -> WriteItem:
    """Plan to write a sharded object, by its unique key."""
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


def object_bytes(value: object) -> io.BytesIO:
    """Serialise a sharded object as Megatron-Core stores it."""
    stream = io.BytesIO()
    torch.save([value.data if isinstance(value, ShardedObject) else value], stream)
    return stream


def object_to_read(key: str) -> ReadItem:
    """Plan to read a sharded object, by its unique key."""
    nowhere, index = torch.Size((0,)), MetadataIndex(key)
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=index,
        dest_offsets=nowhere,
        storage_index=index,
        storage_offsets=nowhere,
        lengths=nowhere,
    )


def parts_to_read(chunk: ShardedTensor, stored: TensorStorageMetadata) -> list[ReadItem]:
    """Plan to read a chunk out of stored chunks, whatever layout has stored them."""
    return list(create_read_items_for_chunk_list(chunk.key, stored, [chunk_metadata(chunk)]))


def place_in(target: Tensor, item: ReadItem) -> Tensor:
    """View the part of a chunk's tensor that an item fills."""
    for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        target = target.narrow(axis, start, length)
    return target


def chunk_index(chunk: ShardedTensor) -> MetadataIndex:
    return MetadataIndex(chunk.key, torch.Size(chunk.global_offset))


def chunk_metadata(chunk: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.global_offset), sizes=torch.Size(stored_shape(chunk)))


def stored_shape(chunk: ShardedTensor) -> tuple[int, ...]:
    """Give the shape of a chunk with the layer's axis, which the parameter lacks."""
    return (1,) * chunk.prepend_axis_num + tuple(chunk.local_shape)

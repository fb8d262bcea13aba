"""Exports weights of any layout into a Hugging Face folder: the ranks of one copy of the model share its files.

One rank writes each file. It puts one logical tensor at a time together from the boxes that the ranks hold, and appends
it to the file, so that no rank ever holds more than one whole tensor.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint.huggingface_folder import INDEX, SINGLE
from megarl.checkpoint.safetensors_file import SafetensorsWriter
from megarl.models.fill import local_view
from megarl.models.placements import Placement
from megarl.models.tensors import Box, LogicalTensor, volume
from megarl.parallel.world import join

MAX_SHARD_BYTES = 5 * 10**9
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """Lists the tensors in a file of a Hugging Face folder, in order."""

    name: str
    tensors: tuple[LogicalTensor, ...]


def plan_files(tensors: Iterable[LogicalTensor], itemsize: int, max_shard_bytes: int) -> list[WeightFile]:
    """Spread tensors over files of at most `max_shard_bytes` (or one tensor); `itemsize` is bytes per element."""
    parts: list[list[LogicalTensor]] = []
    room = 0
    for tensor in tensors:
        size = volume(tensor.box) * itemsize
        if size > room:
            parts.append([])
            room = max_shard_bytes
        parts[-1].append(tensor)
        room -= size
    if len(parts) == 1:
        return [WeightFile(name=SINGLE, tensors=tuple(parts[0]))]
    return [
        WeightFile(name=f"model-{i:05d}-of-{len(parts):05d}.safetensors", tensors=tuple(part))
        for i, part in enumerate(parts, 1)
    ]


def write_index(folder: str, files: Sequence[WeightFile], itemsize: int) -> None:
    """Write `model.safetensors.index.json`, where there is more than one file."""
    if len(files) > 1:
        total = sum(volume(tensor.box) for file in files for tensor in file.tensors) * itemsize
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as f:
            json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, f, indent=2)


def open_file(folder: str, file: WeightFile, dtype: torch.dtype) -> SafetensorsWriter:
    """Start a file, for `append` to write its tensors in their order."""
    shapes = [(tensor.name, tensor.hf_shape) for tensor in file.tensors]
    return SafetensorsWriter(os.path.join(folder, file.name), DTYPE_NAMES[dtype], shapes)


def append(writer: SafetensorsWriter, tensor: Tensor) -> None:
    """Write a CPU tensor behind the file's last one."""
    writer.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


@torch.no_grad()
def export_weights(
    folder: str,
    tensors: Mapping[str, LogicalTensor],
    parameters: Mapping[str, Tensor],
    placements: Mapping[int, Iterable[Placement]],
    group: dist.ProcessGroup,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights into an existing folder. Every rank of the group calls it.

    Args:
        tensors: the whole model's, by name.
        parameters: this rank's, by placement name; all of one type, which is that of the files.
        placements: of each rank of the group (global ranks); together they hold a whole model.

    Raises:
        OSError: this rank could not write, after it has sent the others what they need.
    """
    me, ranks = dist.get_rank(), sorted(placements)
    first = next(iter(parameters.values()))
    files = plan_files(tensors.values(), first.element_size(), max_shard_bytes)
    holders = _holders(placements)
    join(group, first.device)
    writer: SafetensorsWriter | None = None
    failure: OSError | None = None
    for jobs in _rounds(files, ranks):
        pieces = {owner: _pieces(holders[tensor.name], owner) for owner, (_, tensor) in jobs.items()}
        arrived = _exchange(pieces, parameters, first, group)
        if me in jobs:
            file, tensor = jobs[me]
            whole = _assemble(tensor, pieces[me], arrived, parameters, first.dtype)
            if failure is None:
                try:
                    if tensor is file.tensors[0]:
                        writer = open_file(folder, file, first.dtype)
                    assert writer is not None
                    append(writer, whole)
                except OSError as e:
                    failure = e  # the other ranks go on to wait for this one's pieces
    if failure is not None:
        raise failure
    if me == ranks[0]:
        write_index(folder, files, first.element_size())


Holders = dict[Box, dict[int, Placement]]
"""Boxes of a tensor, and the placement on each rank that holds the box."""

Pieces = dict[int, list[Placement]]
"""Placements that each rank gives to one whole tensor."""


def _holders(placements: Mapping[int, Iterable[Placement]]) -> dict[str, Holders]:
    out: dict[str, Holders] = {}
    for rank, places in sorted(placements.items()):
        for place in places:
            out.setdefault(place.tensor, {}).setdefault(place.box, {}).setdefault(rank, place)
    return out


def _pieces(holders: Holders, owner: int) -> Pieces:
    """Choose a source for each box: the owner where it holds the box, else the first rank that does."""
    out: Pieces = {}
    for ranks in holders.values():
        source = owner if owner in ranks else min(ranks)
        out.setdefault(source, []).append(ranks[source])
    return out


def _rounds(files: Sequence[WeightFile], ranks: Sequence[int]) -> Iterator[dict[int, tuple[WeightFile, LogicalTensor]]]:
    """Yield the tensors that the ranks put together at the same time, each for one of its files."""
    queues = [
        [(file, tensor) for file in files[i :: len(ranks)] for tensor in file.tensors] for i, _ in enumerate(ranks)
    ]
    for jobs in itertools.zip_longest(*queues):
        yield {rank: job for rank, job in zip(ranks, jobs, strict=True) if job is not None}


def _exchange(
    pieces: Mapping[int, Pieces], parameters: Mapping[str, Tensor], like: Tensor, group: dist.ProcessGroup
) -> dict[int, Tensor]:
    """Send this rank's pieces to their owners; returns the pieces of this rank's tensor, flat, by sender."""
    me = dist.get_rank()
    ops, arrived = [], {}
    for owner, by_source in pieces.items():
        for source, places in by_source.items():
            if source == me != owner:
                flat = torch.cat([local_view(parameters[place.param], place).flatten() for place in places])
                ops.append(dist.P2POp(dist.isend, flat.view(torch.uint8), owner, group))
            elif owner == me != source:
                arrived[source] = like.new_empty(sum(volume(place.box) for place in places))
                ops.append(dist.P2POp(dist.irecv, arrived[source].view(torch.uint8), source, group))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return arrived


def _assemble(
    tensor: LogicalTensor,
    pieces: Pieces,
    arrived: Mapping[int, Tensor],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Put the whole tensor together on the CPU."""
    whole = torch.empty(tensor.shape, dtype=dtype)
    filled = 0
    for source, places in pieces.items():
        sizes = [volume(place.box) for place in places]
        parts = arrived[source].split(sizes) if source in arrived else itertools.repeat(None)
        for place, size, part in zip(places, sizes, parts, strict=False):
            box = whole[tuple(slice(*i) for i in place.box)]
            box.copy_(local_view(parameters[place.param], place) if part is None else part.view(box.shape))
            filled += size
    assert filled == whole.numel(), f"the ranks do not hold {tensor.name} exactly once"
    return whole

"""Writes a Hugging Face folder from the files of a checkpoint, which any layout may have written.

One tensor at a time is in memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.checkpoint.export_beside import HUGGINGFACE
from megarl.checkpoint.huggingface_folder import FURTHER, INDEX, SINGLE
from megarl.checkpoint.megatron_folder import MegatronWeights
from megarl.checkpoint.safetensors_file import SafetensorsWriter, read_header
from megarl.debugging import hush_dependencies
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.fill import dtype_of
from megarl.models.tensors import LogicalTensor, volume
from megarl.models.weights import logical_tensors
from megarl.processes import die_with_parent

Advance = Callable[[int, int], None]
"""Called with the elements done so far and in all."""

MAX_SHARD_BYTES = 5 * 10**9
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """Lists the tensors in a file of a Hugging Face folder, in order."""

    name: str
    tensors: tuple[LogicalTensor, ...]


def plan_files(tensors: Iterable[LogicalTensor], dtype: torch.dtype, max_shard_bytes: int) -> list[WeightFile]:
    """Spread tensors over files of at most `max_shard_bytes` (or one tensor); `dtype` is that of weights."""
    parts: list[list[LogicalTensor]] = []
    room = 0
    for tensor in tensors:
        size = _nbytes(tensor, dtype)
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


def _nbytes(tensor: LogicalTensor, dtype: torch.dtype) -> int:
    return volume(tensor.box) * dtype_of(tensor, dtype).itemsize


def write_index(folder: str, files: Sequence[WeightFile], dtype: torch.dtype) -> None:
    """Write `model.safetensors.index.json`, where there is more than one file, that of further layers included."""
    place = os.path.join(folder, FURTHER)
    further = read_header(place) if os.path.isfile(place) else {}
    if len(files) > 1 or further:
        total = sum(_nbytes(tensor, dtype) for file in files for tensor in file.tensors)
        total += sum(entry.stop - entry.start for entry in further.values())
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        weight_map |= dict.fromkeys(further, FURTHER)
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as f:
            json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, f, indent=2)


def open_file(folder: str, file: WeightFile, dtype: torch.dtype) -> SafetensorsWriter:
    """Start a file, for `append` to write its tensors in their order."""
    tensors = [(tensor.name, DTYPE_NAMES[dtype_of(tensor, dtype)], tensor.hf_shape) for tensor in file.tensors]
    return SafetensorsWriter(os.path.join(folder, file.name), tensors)


def append(writer: SafetensorsWriter, tensor: Tensor) -> None:
    """Write a CPU tensor behind the file's last one."""
    writer.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def write_weights(
    source: MegatronWeights, folder: str, arch: Architecture, *, max_shard_bytes: int, advance: Advance
) -> None:
    """Write the weights of a checkpoint into an existing folder, in the type that they have there.

    Raises:
        ValueError: they cannot be read, or are not finite.
    """
    tensors = logical_tensors(arch)
    total, done = sum(volume(tensor.box) for tensor in tensors.values()), 0
    files = plan_files(tensors.values(), source.dtype, max_shard_bytes)
    for file in files:
        writer = open_file(folder, file, source.dtype)
        for tensor in file.tensors:
            value = source.tensor(tensor.name)
            refuse_nonfinite(tensor.name, value)
            append(writer, value.permute(tensor.order))
            done += volume(tensor.box)
            advance(done, total)
    write_index(folder, files, source.dtype)


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with which a model computes nothing but NaN. Raises ValueError naming it."""
    low, high = tensor.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise ValueError(f"{name} is not finite everywhere: the weights are of no use, and nothing is written")


def main(folder: str, prefix: str, scalar: str) -> None:
    """Do the work of `export_beside` in its process."""
    die_with_parent()
    os.nice(10)
    hush_dependencies()
    target = os.path.join(folder, HUGGINGFACE)
    arch = read_architecture(target)
    arch = arch.with_scalar_output() if scalar else arch
    write_weights(
        MegatronWeights(folder, arch, prefix), target, arch, max_shard_bytes=MAX_SHARD_BYTES, advance=lambda *_: None
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

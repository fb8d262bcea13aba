"""Reads the weights of a Hugging Face folder slice by slice: each rank reads its own and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.checkpoint.file_slice import file_slice
from megarl.checkpoint.huggingface_folder import weight_entries
from megarl.models.architecture import Architecture
from megarl.models.fill import as_logical
from megarl.models.tensors import Box, LogicalTensor
from megarl.models.weights import SCORE, logical_tensors


class HuggingFaceWeights:
    """Reads the weights of a folder that has passed `check_weights`, by logical name, from memory-mapped files.

    A scalar output that the folder lacks is 0.
    """

    def __init__(self, folder: str, arch: Architecture) -> None:
        self.tensors = logical_tensors(arch)
        self._entries = weight_entries(folder, self.tensors)
        self._files: dict[str, Any] = {}

    @property
    def dtypes(self) -> set[str]:
        """List the types of the weights, as safetensors names them; not of what is float32 in any model."""
        names = (tensor.name for tensor in self.tensors.values() if tensor.kind != "buffer")
        return {self._entries[name].dtype for name in names if name in self._entries}

    def box(self, tensor: LogicalTensor, box: Box) -> Tensor:
        """Read a box of a logical tensor, in the file's type: a view of the mapped file, which holds no memory."""
        if tensor.name == SCORE and SCORE not in self._entries:
            return torch.zeros([hi - lo for lo, hi in box])
        at = file_slice(tensor.in_file(), tuple(box[axis] for axis in tensor.order))
        entry = self._entries[tensor.name]
        if entry.file not in self._files:
            self._files[entry.file] = safe_open(entry.file, framework="pt")
        stored, ranges = self._files[entry.file].get_slice(entry.name), at.ranges
        if entry.place is None:
            part: Tensor = stored[tuple(slice(*r) for r in ranges)]
        else:
            (expert, row), ((lo, hi), columns) = entry.place, ranges
            part = stored[expert : expert + 1, row + lo : row + hi, slice(*columns)][0]
        return as_logical(tensor, part.view(at.view)[tuple(slice(*i) for i in at.index)])

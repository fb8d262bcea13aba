"""Hugging Face weights into a rank's parameters: each rank reads its own slices and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.checkpoint.file_slice import file_slice
from megarl.checkpoint.huggingface_folder import weight_entries
from megarl.models.architecture import Architecture
from megarl.models.tensors import Box, Placement, logical_tensors
from megarl.models.weights import local_view


class HuggingFaceWeights:
    """The weights of a folder that `check_weights` has passed, by logical name; the files are memory-mapped."""

    def __init__(self, folder: str, arch: Architecture) -> None:
        self.tensors = logical_tensors(arch)
        self._entries = weight_entries(folder)
        self._files: dict[str, Any] = {}

    @property
    def dtypes(self) -> set[str]:
        """The types of the weights, in safetensors' words."""
        return {self._entries[name].dtype for name in self.tensors}

    def box(self, name: str, box: Box) -> Tensor:
        """A box of a logical tensor, in the file's type; a view of the mapped file, which holds no memory."""
        at = file_slice(self.tensors[name], box)
        file = self._entries[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        part: Tensor = self._files[file].get_slice(name)[tuple(slice(*r) for r in at.ranges)]
        return part.view(at.view)[tuple(slice(*i) for i in at.index)]


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, Tensor], placements: Iterable[Placement], weights: HuggingFaceWeights
) -> None:
    """Write every placement's box from the files, converted to the parameter's type; padding rows become zero."""
    for parameter in parameters.values():
        parameter.zero_()
    for place in placements:
        local_view(parameters[place.param], place).copy_(weights.box(place.tensor, place.box))

"""The keys and values of the running sequences, one slot per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.tensors import heads_on_rank

LENGTH_MULTIPLE = 16
"""CUDA's memory-efficient attention copies a mask whose rows are not a multiple of 16 long, in every layer."""


def round_length(length: int) -> int:
    """The length that attention reads for sequences of up to `length` tokens."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


class KVCache:
    """Keys and values, each [layers, slots, length, kv_heads, head_dim] in the heads of this rank.

    Running sequences sit in the first slots without a gap, so decoding reads a plain slice and gathers nothing.
    """

    def __init__(
        self, arch: Architecture, *, tp: int, slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        (first, last), _ = heads_on_rank(arch, tp, 0)
        shape = (arch.num_layers, slots, round_length(length), last - first, arch.head_dim)
        # Not torch.empty: a masked position counts for nothing only if it is finite (0 x NaN is NaN).
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write_rectangle(self, layer: int, first_slot: int, k: Tensor, v: Tensor) -> None:
        """k, v: [sequences, tokens, kv_heads, head_dim], from position 0 on into the slots from `first_slot` on."""
        slots = slice(first_slot, first_slot + k.shape[0])
        self.keys[layer, slots, : k.shape[1]] = k
        self.values[layer, slots, : k.shape[1]] = v

    def write_rows(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]; rows: int64 [T], see `row_indices`."""
        self.keys[layer].flatten(0, 1).index_copy_(0, rows, k)
        self.values[layer].flatten(0, 1).index_copy_(0, rows, v)

    def row_indices(self, positions: Tensor) -> Tensor:
        """int64 [T], where the token at positions[i] of the sequence in slot i is written."""
        slots = torch.arange(len(positions), device=positions.device)
        return slots * self.keys.shape[2] + positions

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slots to other slots; no slot is both source and target."""
        if not sources:
            return
        source, target = torch.tensor([sources, targets], device=self.keys.device)
        # Layer by layer: the temporary copy of all layers at once would be as large as the slots themselves.
        for cache in (*self.keys, *self.values):
            held = cache[:, :length]
            held.index_copy_(0, target, held.index_select(0, source))

"""The keys and values of the running sequences, one slot per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.tensors import heads_on_rank
from megarl.rollout.native.scheduler import SlotCopies

LENGTH_MULTIPLE = 16
"""CUDA's memory-efficient attention copies a mask whose rows are not a multiple of 16 long, in every layer."""


def round_length(length: int) -> int:
    """The length that attention reads for sequences of up to `length` tokens."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


class KVCache:
    """Keys and values, each [layers, slots, kv_heads, length, head_dim] in the heads of this rank.

    Running sequences sit in the first slots without a gap, so decoding reads a plain slice and gathers nothing.
    """

    def __init__(
        self, arch: Architecture, *, tp: int, slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        (first, last), _ = heads_on_rank(arch, tp, 0)
        shape = (arch.num_layers, slots, last - first, round_length(length), arch.head_dim)
        # Not torch.empty: a masked position counts for nothing only if it is finite (0 x NaN is NaN).
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write_prompts(self, layer: int, first_slot: int, k: Tensor, v: Tensor) -> None:
        """k, v: [sequences, kv_heads, tokens, head_dim], from position 0 on into the slots from `first_slot` on."""
        slots = slice(first_slot, first_slot + k.shape[0])
        self.keys[layer, slots, :, : k.shape[2]] = k
        self.values[layer, slots, :, : v.shape[2]] = v

    def write_tokens(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim], token i at positions[i] of slots[i]; both int64 [T]."""
        self.keys[layer][slots, :, positions] = k
        self.values[layer][slots, :, positions] = v

    def copy_slots(self, copies: SlotCopies) -> None:
        """Carry out what the scheduler planned."""
        if not copies.sources:
            return
        source, target = torch.tensor([copies.sources, copies.targets], device=self.keys.device)
        # Layer by layer: the temporary copy of all layers at once would be as large as the slots themselves.
        for cache in (*self.keys, *self.values):
            held = cache[:, :, : copies.length]
            held.index_copy_(0, target, held.index_select(0, source))

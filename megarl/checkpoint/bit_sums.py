"""Adds up the bits of tensors, to tell whether what is read from a checkpoint is what was saved, in any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megarl.models.bits import bits_of

_CHUNK = 1 << 24
"""Elements that are widened at a time."""


@torch.no_grad()
def bit_sums(parts: Iterable[ShardedTensor]) -> dict[str, int]:
    """Add up the elements' bits as integers by key, modulo 2^64, a layer's times an odd number of its own.

    The sums of all ranks' parts, which cover each tensor once, are those of whole tensors. A change of one element
    always shows, and so do tensors that are those of another step, of another name or of another layer; elements that
    have changed places within a layer do not.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for part in parts:
        layer = sum(part.global_offset[: part.prepend_axis_num])
        bits = bits_of(part.data.detach())
        total = sum((chunk.sum(dtype=torch.int64) for chunk in bits.split(_CHUNK)), torch.zeros((), dtype=torch.int64))
        by_device.setdefault(total.device, []).append((part.key, (2 * layer + 1) * total))
    return total_of(
        {key: value}
        for sums in by_device.values()  # each waits for its device once
        for (key, _), value in zip(sums, torch.stack([total for _, total in sums]).tolist(), strict=True)
    )


def total_of(sums: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up sums by key."""
    total: Counter[str] = Counter()
    for each in sums:
        total.update(each)
    return {key: value % 2**64 for key, value in total.items()}

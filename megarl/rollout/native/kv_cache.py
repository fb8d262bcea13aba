"""The keys and values of the running sequences, in blocks (arXiv 2309.06180), and the table of who holds which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.rollout.native.blocks import SCRATCH_BLOCK
from megarl.rollout.native.scheduler import BlockCopies, Running

_FIRST_BLOCKS = 64  # of a cache in host memory


class KVCache:
    """Holds keys and values by blocks.

    On a GPU, whose memory `cache_blocks` has measured, it takes all its memory at once. On a CPU nobody has set a part
    of the memory aside: it grows with the highest block in use, and the pool gives out the lowest first.

    Args:
        blocks: how many at most, the scratch block included; kept as an attribute.
        max_num_seqs: sequences that run together.
        max_model_len: tokens of the longest.

    Attributes:
        layers: of each layer, keys and values [2, blocks, kv_heads, BLOCK_SIZE, head_dim] in the heads of this rank;
            on a CPU so many blocks as were in use.
        tables: int32 [max_num_seqs + 1, blocks of the longest sequence], the blocks of the sequence in each slot. The
            last row belongs to no sequence.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        tp: int,
        blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        held = blocks if device.type == "cuda" else min(blocks, _FIRST_BLOCKS)
        shapes = (layer.attention.cache_shape(tp) for layer in arch.each_layer)
        # Not torch.empty: a masked position counts for nothing only if it is finite (0 x NaN is NaN).
        self.layers = [
            torch.zeros(kept, held, heads, BLOCK_SIZE, width, dtype=dtype, device=device)
            for kept, heads, width in shapes
        ]
        self.tables = torch.full(
            (max_num_seqs + 1, blocks_for(max_model_len)), SCRATCH_BLOCK, dtype=torch.int32, device=device
        )

    def enter(self, sequences: Sequence[Running]) -> None:
        """Write down the blocks that sequences enter with."""
        if not sequences:
            return
        self._reach(max(max(r.blocks, default=SCRATCH_BLOCK) for r in sequences))
        width = max(len(r.blocks) for r in sequences)
        rows = [[*r.blocks, *([SCRATCH_BLOCK] * (width - len(r.blocks)))] for r in sequences]
        slots = torch.tensor([r.slot for r in sequences], device=self.tables.device)
        self.tables[slots, :width] = torch.tensor(rows, dtype=torch.int32, device=self.tables.device)

    def grow(self, slots: Tensor, positions: Tensor, blocks: Tensor) -> None:
        """Write down that positions[i] of the sequence in slots[i] is in blocks[i]; all int64 [T]."""
        if blocks.device.type != "cuda":
            self._reach(int(blocks.max()))
        self.tables[slots, positions // BLOCK_SIZE] = blocks.int()

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim], token i at positions[i] of the sequence in slots[i]; both int64 [T]."""
        blocks, within = self.tables[slots, positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE
        keys, values = self.layers[layer]
        keys[blocks, :, within] = k
        values[blocks, :, within] = v

    def read(self, layer: int, slots: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `blocks` blocks of some sequences, each [S, kv_heads, tokens, head_dim]."""
        held = self.layers[layer][:, self.tables[slots, :blocks].flatten()]
        keys, values = held.unflatten(1, (len(slots), blocks)).transpose(2, 3).flatten(3, 4)
        return keys, values

    def _reach(self, block: int) -> None:
        """Take memory for this block and those below it, if it is not there."""
        held = self.layers[0].shape[1]
        if block < held:
            return
        wanted = min(self.blocks, max(2 * held, block + 1))
        for i, layer in enumerate(self.layers):
            more = layer.new_zeros(layer.shape[0], wanted - held, *layer.shape[2:])
            self.layers[i] = torch.cat((layer, more), dim=1)

    def copy(self, copies: BlockCopies) -> None:
        """Carry out what the scheduler planned."""
        if not copies.sources:
            return
        source, target = torch.tensor([copies.sources, copies.targets], device=self.tables.device)
        for layer in self.layers:
            layer.index_copy_(1, target, layer.index_select(1, source))

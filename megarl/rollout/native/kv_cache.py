"""Holds the running sequences' keys and values, in blocks (arXiv 2309.06180), the table of their blocks, and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.parallel.upload import upload
from megarl.rollout.native.blocks import SCRATCH_BLOCK
from megarl.rollout.native.scheduler import Copies, Running
from megarl.types.routed_experts import Choices, RoutedExperts

_FIRST_BLOCKS = 64  # of a cache in host memory


class KVCache:
    """Holds keys and values by blocks.

    On a GPU, whose memory `cache_blocks` has measured, it takes all its memory at once. On a CPU, where no memory is
    set aside, it grows with the highest block in use; the pool gives the lowest out first.

    Args:
        blocks: their greatest number, the scratch block included; kept as an attribute.
        max_num_seqs: sequences that run together.
        max_model_len: tokens of the longest.
        routed: form of the experts that are recorded beside the keys; None: they are not.

    Attributes:
        layers: of each layer, keys and values [2, blocks, kv_heads, BLOCK_SIZE, head_dim] in the heads of this rank, or
            what else its attention keeps (`cache_shape`); on a CPU only up to the highest block used so far.
        states: of each layer, tensors [max_num_seqs + 1, ...] of what its attention keeps of the sequence in each slot,
            however long that is (`state_shapes`); of most kinds of attention none.
        tables: int32 [max_num_seqs + 1, blocks of the longest sequence], the blocks of the sequence in each slot. The
            last row belongs to no sequence.
        routed: [blocks, BLOCK_SIZE, layers with experts, experts per token], the experts of the tokens whose keys are
            there, so that sequences share these, too; as many blocks as `layers` have.
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
        routed: RoutedExperts | None = None,
    ) -> None:
        self.blocks = blocks
        size = blocks if device.type == "cuda" else min(blocks, _FIRST_BLOCKS)
        shapes = (layer.attention.cache_shape(tp) for layer in arch.each_layer)
        # Not torch.empty: a masked position counts for nothing only if it is finite (0 x NaN is NaN).
        self.layers = [
            torch.zeros(count, size, heads, BLOCK_SIZE, width, dtype=dtype, device=device)
            for count, heads, width in shapes
        ]
        self.states = [
            [torch.zeros(max_num_seqs + 1, *shape, device=device) for shape in layer.attention.state_shapes(tp)]
            for layer in arch.each_layer
        ]
        self.routed = None if routed is None else _experts(routed, size, device)
        self.tables = torch.full(
            (max_num_seqs + 1, blocks_for(max_model_len)), SCRATCH_BLOCK, dtype=torch.int32, device=device
        )

    def enter(self, sequences: Sequence[Running]) -> None:
        """Record the blocks of sequences that enter; their states are those of no tokens."""
        if not sequences:
            return
        self._reach(max(max(r.blocks, default=SCRATCH_BLOCK) for r in sequences))
        width = max(len(r.blocks) for r in sequences)
        rows = [[*r.blocks, *([SCRATCH_BLOCK] * (width - len(r.blocks)))] for r in sequences]
        slots = upload(torch.tensor([r.slot for r in sequences]), self.tables.device)
        self.tables[slots, :width] = upload(torch.tensor(rows, dtype=torch.int32), self.tables.device)
        for state in self._each_state():
            state[slots] = 0

    def grow(self, slots: Tensor, positions: Tensor, blocks: Tensor) -> None:
        """Record that positions[i] of the sequence in slots[i] is in blocks[i]; all int64 [T]."""
        if blocks.device.type != "cuda":
            self._reach(int(blocks.max()))
        self.tables[slots, positions // BLOCK_SIZE] = blocks.int()

    def write(self, layer: int, slots: Tensor, positions: Tensor, *heads: Tensor) -> None:
        """Store keys and values, say, each [T, heads, width], at positions[i] of the sequence in slots[i].

        Args:
            slots, positions: int64 [T].
        """
        blocks, within = self._places(slots, positions)
        for stored, new in zip(self.layers[layer], heads, strict=True):
            stored[blocks, :, within] = new

    def read(self, layer: int, slots: Tensor, blocks: int) -> Tensor:
        """Gather keys and values, say, of the first `blocks` blocks of sequences: [2, S, heads, tokens, width]."""
        stored = self.layers[layer][:, self.tables[slots, :blocks].flatten()]
        return stored.unflatten(1, (len(slots), blocks)).transpose(2, 3).flatten(3, 4)

    def write_routed(self, slots: Tensor, positions: Tensor, experts: Tensor) -> None:
        """Store the experts of the tokens at positions[i] of the sequence in slots[i].

        Args:
            slots, positions: int64 [T].
            experts: int16 [T, layers with experts, experts per token].
        """
        assert self.routed is not None
        self.routed[self._places(slots, positions)] = experts.to(self.routed.dtype)

    def _places(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Find the blocks of tokens, and their places within them, both int64 [T]."""
        return self.tables[slots, positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE

    def read_routed(self, blocks: Sequence[int], first: int, end: int) -> Choices:
        """Read the experts of the tokens from `first` to before `end` of a sequence with these blocks."""
        assert self.routed is not None
        skipped = first // BLOCK_SIZE
        needed = torch.tensor(blocks[skipped : blocks_for(end)], device=self.routed.device)
        start = first - skipped * BLOCK_SIZE
        experts: Choices = self.routed[needed].flatten(0, 1)[start : start + end - first].cpu().numpy()
        return experts

    def _reach(self, block: int) -> None:
        """Allocate the cache up to this block, if it is not allocated."""
        size = self.layers[0].shape[1]
        if block < size:
            return
        new_size = min(self.blocks, max(2 * size, block + 1))
        for i, layer in enumerate(self.layers):
            more = layer.new_zeros(layer.shape[0], new_size - size, *layer.shape[2:])
            self.layers[i] = torch.cat((layer, more), dim=1)
        if self.routed is not None:
            more = self.routed.new_zeros(new_size - size, *self.routed.shape[1:])
            self.routed = torch.cat((self.routed, more))

    def copy(self, blocks: Copies, slots: Copies) -> None:
        """Copy the blocks and the states of slots that the scheduler planned to copy."""
        if blocks.sources:
            source, target = upload(torch.tensor([blocks.sources, blocks.targets]), self.tables.device)
            for layer in self.layers:
                layer.index_copy_(1, target, layer.index_select(1, source))
            if self.routed is not None:
                self.routed[target] = self.routed[source]
        if slots.sources:
            source, target = upload(torch.tensor([slots.sources, slots.targets]), self.tables.device)
            for state in self._each_state():
                state.index_copy_(0, target, state.index_select(0, source))

    def _each_state(self) -> Iterator[Tensor]:
        return (state for states in self.states for state in states)


def _experts(form: RoutedExperts, blocks: int, device: torch.device) -> Tensor:
    dtype = torch.uint8 if form.dtype.itemsize == 1 else torch.int16
    return torch.zeros(blocks, BLOCK_SIZE, form.layers, form.experts_per_token, dtype=dtype, device=device)

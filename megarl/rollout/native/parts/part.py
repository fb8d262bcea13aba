"""What every part of a layer is in the native engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.rollout.native.kv_cache import KVCache

Attention = Callable[..., Tensor]
"""(layer, heads...) -> what the queries attend to, [T, heads * head_dim]: the attention of a forward pass.

It knows the positions of the pass's flat batch of tokens, and stores in the KV cache what that keeps of the layer. The
heads are what the attention's weights make of the tokens: queries, keys and values, say, not yet rotated.
"""


class Weights(Protocol):
    """The weights of a part on a tensor-parallel rank, which compute it.

    Args:
        kind: the part, of `megarl.models.parts`.
        weights: by name within the layer, shaped as `shapes` says.
        eps: of the norms in the part.
    """

    def __init__(self, kind: Any, weights: Mapping[str, Tensor], *, tp: int, eps: float) -> None: ...

    @staticmethod
    def shapes(kind: Any, hidden: int, tp: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of a rank's weights by name within the layer."""
        ...

    def __call__(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the tensor-parallel ranks."""
        ...


class Passes(Protocol):
    """Gives each forward pass the attention of its tokens.

    Args:
        kind: the attention, of `megarl.models.parts`.
    """

    def __init__(self, kind: Any, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None: ...

    def prefill(self, cache: KVCache, *, slots: Sequence[int], lengths: Sequence[int]) -> Attention:
        """The first `lengths[i]` tokens of the sequence in `slots[i]`, one sequence after another."""
        ...

    def decode(self, cache: KVCache, *, slots: Tensor, positions: Tensor, blocks: Tensor, longest: int) -> Attention:
        """Token i is at positions[i] of the sequence in slots[i], in blocks[i], and attends to all up to its position.

        Args:
            slots, positions, blocks: int64 [T].
            longest: no less than max(positions) + 1, known without asking the device.
        """
        ...

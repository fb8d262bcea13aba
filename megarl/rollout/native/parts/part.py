"""Defines the interface of a layer's parts in the native engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.experts import ExpertPlace, TensorSplit
from megarl.rollout.native.kv_cache import KVCache

Attention = Callable[..., Tensor]
"""(layer, heads...) -> output [T, heads * head_dim]: the attention of a forward pass.

It knows the positions of the pass's flat batch of tokens, and stores the layer's keys and values, say, in the KV cache.
The attention's weights compute its inputs of the tokens: queries, keys and values, say, not yet rotated.
"""


@dataclass(frozen=True)
class Group:
    """Is the tensor-parallel ranks of a replica, as one of them sees them.

    Attributes:
        ranks: None: a single rank.
    """

    ranks: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return 1 if self.ranks is None else self.ranks.size()

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank()

    def sum_(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors, in place."""
        if self.ranks is not None:
            dist.all_reduce(x, group=self.ranks)
        return x

    def mean_(self, x: Tensor) -> Tensor:
        """Take the mean of the ranks' tensors; x is overwritten."""
        return self.sum_(x) / self.size


class MLPWeights(Protocol):
    """Holds the weights of an MLP, or of experts, on a tensor-parallel rank, and works on each token by itself.

    Args:
        kind: the part, of `megarl.models.parts`.
        weights: by name within the layer, shaped as `shapes` says.
        experts: the rank's place among those with a layer's experts.
    """

    def __init__(self, kind: Any, weights: Mapping[str, Tensor], *, experts: ExpertPlace) -> None: ...

    @staticmethod
    def shapes(kind: Any, hidden: int, split: TensorSplit) -> dict[str, tuple[int, ...]]:
        """Give the shapes of a rank's weights by name within the layer."""
        ...

    def __call__(self, x: Tensor, routed: list[Tensor] | None = None) -> Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the tensor-parallel ranks.

        Args:
            routed: experts append the numbers of those that the tokens go to, int16 [T, experts_per_token].
        """
        ...


class AttentionWeights(Protocol):
    """Holds the weights of attention on a tensor-parallel rank: makes heads of the tokens, and the layer's output of
    what they attend to.

    Args:
        kind, weights: likewise.
        group: the ranks that share the part.
        eps: of the norms in the part.
    """

    def __init__(self, kind: Any, weights: Mapping[str, Tensor], *, group: Group, eps: float) -> None: ...

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

    def prefill(self, cache: KVCache, *, slots: Sequence[int], lengths: Sequence[int], start: int = 0) -> Attention:
        """Give the attention of the first `lengths[i]` tokens of the sequence in `slots[i]`, one after another.

        Args:
            start: tokens before these, which are in the cache; of one sequence alone, unless 0.
        """
        ...

    def decode(self, cache: KVCache, *, slots: Tensor, positions: Tensor, blocks: Tensor, longest: int) -> Attention:
        """Give the attention of new tokens: i, at positions[i] of the sequence in slots[i], attends up to its position.

        Args:
            slots, positions, blocks: int64 [T]; token i goes to blocks[i].
            longest: no less than max(positions) + 1, known without asking the device.
        """
        ...

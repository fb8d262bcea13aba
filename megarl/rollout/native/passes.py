"""Gives each layer of a forward pass the attention of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.parts.part import AttentionPart
from megarl.rollout.native.parts import module_of
from megarl.rollout.native.parts.part import Attention, Passes


class PassesByLayer(Passes):
    """Keeps the passes of each kind of attention of a model, and sends each layer to those of its kind."""

    def __init__(self, arch: Architecture, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kinds = [layer.attention for layer in arch.each_layer]
        self._passes: dict[AttentionPart, Passes] = {
            kind: module_of(kind).Passes(kind, max_model_len=max_model_len, dtype=dtype, device=device)
            for kind in dict.fromkeys(self._kinds)
        }

    def prefill(self, *args: Any, **kwargs: Any) -> Attention:
        return self._by_layer(lambda passes: passes.prefill(*args, **kwargs))

    def decode(self, *args: Any, **kwargs: Any) -> Attention:
        return self._by_layer(lambda passes: passes.decode(*args, **kwargs))

    def _by_layer(self, of: Callable[[Passes], Attention]) -> Attention:
        attentions = {kind: of(passes) for kind, passes in self._passes.items()}

        def attend(layer: int, *heads: Tensor | None) -> Tensor:
            return attentions[self._kinds[layer]](layer, *heads)

        return attend

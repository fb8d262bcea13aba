"""Adds a router's bias to its logits."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BiasedRouter(TopKRouter):
    """Is Megatron-Core's router, which adds a bias of whatever type to its float32 logits.

    Megatron-Core gives the bias to Transformer Engine's product as it is, and cuBLAS reads it in the logits' type: two
    numbers of bfloat16 as one.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Compute the logits of [..., hidden]: float32 [..., experts]."""
        logits: Tensor = router_gating_linear(input, self.weight, None, torch.float32)
        return logits + self.bias.float()

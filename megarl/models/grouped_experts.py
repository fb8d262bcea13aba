"""Computes a rank's experts in one grouped product, also where no token goes to any of them."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from torch.nn.functional import pad


class GroupedExperts(TEGroupedMLP):
    """Is Megatron-Core's grouped experts, given one row of zeros where there is none.

    Transformer Engine's kernel for the products of all experts ends the process when all of them are empty.
    """

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what the experts return for [tokens, hidden], in the order of the experts."""
        rows = len(tokens)
        if rows == 0:
            tokens, probs, tokens_per_expert = pad(tokens, (0, 0, 0, 1)), pad(probs, (0, 1)), tokens_per_expert.clone()
            tokens_per_expert[0] = 1
        out, bias = super().forward(tokens, tokens_per_expert, probs, *args, **kwargs)
        return out[:rows], bias

"""Builds the last linear layer of an expert with biases."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear


class ExpertOutput(RowParallelLinear):
    """Is Megatron-Core's linear layer, whose bias is one expert's, on its one rank.

    Megatron-Core adds the bias in place, which autograd forbids on what a sum over one rank returns; with sequence
    parallelism it would add up the bias' gradients over tensor-parallel ranks, which have other experts, and it would
    leave those of all ranks but the first out of the gradient norm.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True
        self.bias.sequence_parallel, self.bias.tensor_model_parallel = False, True

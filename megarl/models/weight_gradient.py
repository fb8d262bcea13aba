"""Adds a matrix's gradient straight into its fp32 buffer: no copy in the weights' precision, no second pass.

Megatron-Core does so when apex's `fused_weight_gradient_mlp_cuda` is installed; cuBLAS can do it alone.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def add_weight_gradient(main_grad: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """Add: main_grad += grad_output.T @ inputs, summed in main_grad's precision.

    Args:
        main_grad: [out, in].
        grad_output: [tokens, out].
        inputs: [tokens, in].
    """
    if main_grad.dtype == inputs.dtype:
        main_grad.addmm_(grad_output.t(), inputs)
    elif main_grad.is_cuda:
        torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), inputs, main_grad.dtype, out=main_grad)
    else:  # torch mixes precisions in a matrix product on GPUs only
        main_grad += grad_output.t() @ inputs


class _InPlaceOfApex:
    """Stands in for apex's module in Megatron-Core's linear layers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        add_weight_gradient(main_grad, grad_output, inputs)


def enable_gradient_accumulation_fusion() -> None:
    """Let `gradient_accumulation_fusion` work where apex is not installed. Idempotent."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _InPlaceOfApex
        layers._grad_accum_fusion_available = True

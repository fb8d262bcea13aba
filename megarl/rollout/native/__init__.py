"""Implements the built-in engine: PyTorch on CPU, with Triton kernels and CUDA graphs on GPUs, tensor-parallel."""

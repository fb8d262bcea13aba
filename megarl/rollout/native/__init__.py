"""The built-in engine: plain PyTorch, on CPU and CUDA, tensor-parallel."""

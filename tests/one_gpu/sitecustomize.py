"""Several ranks on one GPU, for tests of what NCCL, CUDA IPC and their ends do; slow, and nothing to time.

    PYTHONPATH=tests/one_gpu:$PWD RANKS_OF_ONE_GPU=4 pytest tests/test_reshard_on_gpus.py

Python imports this module as it starts. NCCL refuses two ranks on one GPU of one host: each rank gets a host of its
own, as far as NCCL knows, and they talk through sockets. vLLM, which refuses memory that others give back while it
starts, sees this process's memory alone. A test that compares the GPU's free memory fails here.
"""

import os
from typing import Any

RANKS = int(os.environ.get("RANKS_OF_ONE_GPU") or 0)

if RANKS:
    import torch

    set_device, properties, memory = torch.cuda.set_device, torch.cuda.get_device_properties, torch.cuda.mem_get_info

    def set_only_device(device: Any) -> None:
        """Device 0, and NCCL's host for the rank that asks for one by its number."""
        if isinstance(device, int):
            os.environ.setdefault("NCCL_HOSTID", f"rank {os.environ.get('RANK', device)}")
        set_device(0)

    def own_memory(device: Any = None) -> tuple[int, int]:
        """Free and total bytes, were there no other process; a GiB is left to what torch does not count."""
        total = memory(0)[1]
        return total - torch.cuda.memory_reserved(0) - 2**30, total

    torch.cuda.set_device = set_only_device
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.get_device_properties = lambda device=None: properties(0)
    torch.cuda.mem_get_info = lambda device=None: memory(0)
    torch.cuda.can_device_access_peer = lambda device, peer: False  # vLLM's all-reduce would take it for two GPUs
    torch.accelerator.get_memory_info = own_memory

"""How much of a GPU's memory is in use."""

from __future__ import annotations

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes in use at most since the last call: tensors, and whatever else there is on the GPU.

    Blocks that torch keeps in reserve do not count: training and engine both have them given back when they need to.
    """
    free, total = torch.cuda.mem_get_info(device)
    # torch counts the memory of a sleeping vLLM among both of its own figures, although it is free: it cancels out
    beside_tensors = total - free - torch.cuda.memory_reserved(device)
    peak = beside_tensors + torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak

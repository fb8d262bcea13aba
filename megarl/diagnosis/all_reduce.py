"""Runs a rank of `megarl doctor --nccl`, which sums a buffer over all ranks and prints the rate."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from megarl.parallel.meeting import follow_launcher
from megarl.processes import die_with_parent

BYTES_ON_GPU, BYTES_ON_CPU = 256 * 2**20, 8 * 2**20
ROUNDS = 10


def main() -> int:
    """Run the rank; returns 1 if the sum is wrong."""
    die_with_parent(int(os.environ["MEGARL_LAUNCHER"]))
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    follow_launcher()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    line, is_right = all_reduce_line(device)
    if rank == 0:
        print(line, flush=True)
    dist.destroy_process_group()
    return 0 if is_right else 1


def buffer_on(device: torch.device) -> torch.Tensor:
    """Make a buffer of the size that is measured."""
    return torch.zeros((BYTES_ON_GPU if device.type == "cuda" else BYTES_ON_CPU) // 4, device=device)


def all_reduce_line(device: torch.device) -> tuple[str, bool]:
    """Sum a buffer over all ranks; returns a line about it, and whether the sum was right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    buffer = buffer_on(device) + float(rank + 1)
    dist.all_reduce(buffer)
    is_right = bool((buffer == world * (world + 1) / 2).all())
    seconds = _seconds(buffer)
    moved = 2 * (world - 1) / world * buffer.nbytes  # bytes that each rank moves in a ring
    ranks = f"{world} {'GPUs over NCCL' if buffer.is_cuda else 'CPU ranks over gloo'}"
    rate = f"{moved / seconds / 1e9:.1f} GB/s per rank" if world > 1 else "nothing to send to"
    size = f"{buffer.nbytes / 2**20:.0f} MiB in {1e3 * seconds:.2f} ms"
    return f"  {'ok' if is_right else 'MISSING':<8}{ranks}: {size}, {rate}", is_right


def _seconds(buffer: torch.Tensor) -> float:
    """Measure the mean seconds of a round."""
    buffer.zero_()
    dist.barrier()
    if buffer.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(buffer)
    if buffer.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / ROUNDS


if __name__ == "__main__":
    sys.exit(main())

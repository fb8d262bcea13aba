"""What the links between ranks carry, for tools/bench_reshard.py to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from benchmark import milliseconds

from megarl.models.kernels import TRITON
from megarl.parallel.world import World, join
from megarl.reshard.transport import cuda_ipc
from megarl.reshard.transport.collective import post_exchange
from megarl.reshard.transport.copies import COPY
from megarl.reshard.transport.direct_reads import Offer, agree, host_identity

ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes/s that arrive at every rank, all ranks at once; None where there is no such link.

    Attributes:
        pull: read from the next rank's memory by a copy engine.
        pull_by_kernel: the same by the reshard's kernel.
        exchange: sent to and received from a partner over the process group.
    """

    pull: float | None = None
    pull_by_kernel: float | None = None
    exchange: float | None = None

    @property
    def best(self) -> float | None:
        return max((rate for rate in (self.pull, self.pull_by_kernel, self.exchange) if rate), default=None)


def measure_links(world: World, nbytes: int) -> Links:
    """Every rank calls it.

    Args:
        nbytes: that are moved at once.
    """
    if world.size == 1:
        return Links()
    source, destination = (torch.zeros(nbytes, dtype=torch.uint8, device=world.device) for _ in range(2))
    pull, by_kernel = _pull(world, source, destination) if world.device.type == "cuda" else (None, None)
    partner = world.rank ^ 1

    def exchange() -> None:
        if partner < world.size:
            for work in post_exchange({partner: source}, {partner: destination}, dist.group.WORLD):
                work.wait()

    join(dist.group.WORLD, world.device)
    exchange()
    return Links(pull=pull, pull_by_kernel=by_kernel, exchange=nbytes / milliseconds(world, exchange, ROUNDS) * 1e3)


def _pull(world: World, source: torch.Tensor, destination: torch.Tensor) -> tuple[float | None, float | None]:
    allocation = cuda_ipc.allocation_at(source.data_ptr())
    try:
        handles, refusal = (cuda_ipc.export_handle(allocation),), ""
    except OSError as e:
        handles, refusal = (), str(e)
    place = 0, source.data_ptr() - allocation.start
    offer = Offer(host=host_identity(), handles=handles, places={"source": place}, refusal=refusal)
    next_rank = (world.rank + 1) % world.size

    def open_(_: int, theirs: Offer) -> tuple[int, int]:
        start = cuda_ipc.open_handle(theirs.handles[0])
        return start, start + theirs.places["source"][1]

    agreement, opened = agree(offer, [next_rank], open_, dist.group.WORLD)
    if len(agreement.direct) < world.size:
        return None, None
    start, address = opened[next_rank]
    there = memory_at(address, rows=1, width=len(source), stride=0, device=world.device)
    here = memory_at(destination.data_ptr(), rows=1, width=len(source), stride=0, device=world.device)
    engine = len(source) / milliseconds(world, lambda: here.copy_(there), ROUNDS) * 1e3
    kernel = None
    if TRITON:
        from megarl.reshard.transport.copy_kernel import FusedCopy

        fused = FusedCopy(np.array([(0, 0, 1, 0, 0, 1, len(source), 0, 0)], dtype=COPY), world.device)
        fused.place(np.array([address, destination.data_ptr()]))
        fused.run()
        kernel = len(source) / milliseconds(world, fused.run, ROUNDS) * 1e3
    torch.cuda.synchronize()
    cuda_ipc.close_handle(start)
    world.barrier("a benchmark")
    return engine, kernel


def memory_at(address: int, *, rows: int, width: int, stride: int, device: torch.device) -> torch.Tensor:
    """[rows, elements] of integers at an address, rows of `width` bytes `stride` bytes apart; owns no memory."""
    stride = stride if rows > 1 else width
    dtype = torch.uint8 if (address | stride | width) % 8 else torch.int64
    storage = torch._C._construct_storage_from_data_pointer(address, device, (rows - 1) * stride + width)
    size = dtype.itemsize
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (rows, width // size), (stride // size, 1))

"""Holds the rates of GPUs and links that predictions assume: the only numbers here that are NVIDIA's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Gives the rates of a GPU and of its links, per GPU and direction.

    Attributes:
        name: as people call it.
        memory: bytes that a process can use.
        runtime: bytes of it that the driver's context, NCCL's buffers and fragmentation take.
        flops: peak FLOP/s of dense matrix products by dtype of the operands.
        mfu: part of that peak which dense models reach, pipeline bubbles not counted.
        mixture_mfu: the same of mixtures of experts.
        memory_rate: bytes/s to and from its memory.
        layer: seconds of a decode step's layer in which its kernels begin and end, beyond what they read and compute.
        launches: seconds in which a host launches the kernels of a layer's forward pass in training.
        peer_rate: bytes/s from another GPU of the node.
        network_rate: bytes/s from another node.
        offloads: whether what is moved to the host leaves room; on a CPU rank it is there already.
    """

    name: str
    memory: float
    runtime: float
    flops: dict[str, float]
    mfu: float
    mixture_mfu: float
    memory_rate: float
    layer: float
    launches: float
    peer_rate: float
    network_rate: float
    offloads: bool = True


PEAKS: Mapping[str, float] = {
    "GB200": 2450e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
"""Peak FLOP/s of dense matrix products in bfloat16, by a part of the GPU's name; the
first match counts. From NVIDIA's data sheets, without sparsity."""

H200 = Accelerator(
    name="H200",
    memory=139 * 2**30,
    runtime=4 * 2**30,  # measured: 2.8 GiB with one rank, 4.4 GiB with two pipeline stages and vLLM
    flops={"bfloat16": PEAKS["H200"], "float32": 67e12},  # NVIDIA's data sheet, without sparsity
    mfu=0.5,  # measured: 48 to 56 % with Transformer Engine, 1.5 billion parameters
    mixture_mfu=0.25,  # measured: 12 to 33 % with 128 experts on one GPU, micro-batches of 8,192 to 32,768 tokens
    memory_rate=4226e9,  # measured: bytes read and written by a copy within the GPU
    layer=40e-6,  # measured: 36 to 45, in CUDA graphs
    launches=1.75e-3,  # measured: 1.7 to 2.1 with Transformer Engine's layers, backward passes counted twice
    peer_rate=374e9,  # measured: one GPU pulls from another's memory through NVLink
    network_rate=50e9,  # an assumption: one 400 Gbit/s adapter per GPU
)


_MEMORY_SHARE = 4226 / 4800
"""Part of the memory's rate on the data sheet that an H200 was measured to reach."""

_LINK_SHARE = 374 / 450
"""The same of the link to the node's other GPUs."""


def _of_data_sheet(
    name: str, *, memory: float, float32: float, memory_rate: float, link: float, network: float
) -> Accelerator:
    """Return a GPU with the rates of NVIDIA's data sheet, as far as an H200 reaches its own; all else is the H200's.

    Args:
        memory: GiB that torch reports.
        float32: TFLOP/s outside of tensor cores.
        memory_rate, link, network: GB/s; of the last two in one direction.
    """
    return replace(
        H200,
        name=name,
        memory=memory * 2**30,
        flops={"bfloat16": PEAKS[name], "float32": float32 * 1e12},
        memory_rate=_MEMORY_SHARE * memory_rate * 1e9,
        peer_rate=_LINK_SHARE * link * 1e9,
        network_rate=network * 1e9,
    )


ACCELERATORS: Mapping[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        # 80 GB, SXM; NVLink 3, an adapter of 200 Gbit/s per GPU
        _of_data_sheet("A100", memory=79, float32=19.5, memory_rate=2039, link=300, network=25),
        # 80 GB, SXM; NVLink 4, as on the H200
        _of_data_sheet("H100", memory=79, float32=67, memory_rate=3350, link=450, network=50),
        H200,
        # 96 GB
        _of_data_sheet("H20", memory=95, float32=44, memory_rate=4000, link=450, network=50),
        # 180 GB, of an HGX B200; NVLink 5
        _of_data_sheet("B200", memory=178, float32=75, memory_rate=8000, link=900, network=50),
        # 48 GB; no NVLink, 16 lanes of PCIe 4
        _of_data_sheet("L40S", memory=44, float32=91.6, memory_rate=864, link=32, network=25),
    )
}
"""The GPUs that `megarl plan --accelerator` knows, by name."""


def peak_flops(name: str, dtype: str) -> float | None:
    """Look up the peak FLOP/s of a GPU; None where it is not known.

    Args:
        name: as the driver calls it, such as "NVIDIA H200".
        dtype: of the operands; only those of 16 bits are in the table.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for known, peak in PEAKS.items() if known in name), None)

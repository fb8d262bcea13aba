"""Runs a rank of `megarl doctor CONFIG`, which lets the hosts of a job measure themselves and each other before a run.

The rank's argument is the run's folder. The first rank prints the table and names the odd hosts.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megarl.diagnosis.all_reduce import all_reduce_line, buffer_on
from megarl.diagnosis.finding import State
from megarl.diagnosis.gpu_health import gpu_report
from megarl.diagnosis.hosts import GpuReport, HostReport, ahead_of_median, host_table, odd_hosts
from megarl.diagnosis.machine import limits, versions
from megarl.diagnosis.packages import packages
from megarl.parallel.meeting import follow_launcher
from megarl.plain import plain
from megarl.processes import die_with_parent
from megarl.telemetry.progress import print_table

PATIENCE = timedelta(minutes=3)  # of a rank that waits for others
ROUNDS = 5
WRITTEN = 64 * 2**20
"""Bytes of the file with which the disk is measured."""


def main(run_dir: str) -> int:
    """Run the rank; returns 1 if a host is odd, or they cannot talk."""
    die_with_parent(int(os.environ["MEGARL_LAUNCHER"]))
    try:
        return _compare(run_dir)
    except RuntimeError as e:  # of gloo or NCCL
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        print(f"megarl: rank {os.environ['RANK']} on {socket.gethostname()}: {plain(reason[:300])}", file=sys.stderr)
        os._exit(1)  # a communicator that failed may wait for others as it is destroyed


def _compare(run_dir: str) -> int:
    rank, local_rank, ranks_per_node = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    has_gpu = local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(local_rank)
    follow_launcher()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=PATIENCE)
    alike = len(set(_gather(has_gpu))) == 1  # otherwise there is nothing over which all could talk
    line, link = "", None
    if alike:
        device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
        line, is_right = all_reduce_line(device)
        link = _link(device, ranks_per_node)
    gpus: list[GpuReport | None] = _gather(gpu_report(local_rank) if has_gpu else None)
    links = _gather(link)
    clocks = _clocks(ranks_per_node)
    hosts: list[tuple[str, dict[str, str], float | None, list[str]]] = _gather(_host(run_dir, local_rank == 0))
    reports = [
        HostReport(
            name=f"node {node} on {name}",
            versions=own_versions,
            gpus=tuple(gpus[first : first + ranks_per_node]),
            link=sum(links[first : first + ranks_per_node]) if alike and len(hosts) > ranks_per_node else None,
            write=write,
            ahead=clocks[node],
            faults=tuple(faults),
        )
        for node, first in enumerate(range(0, len(hosts), ranks_per_node))
        for name, own_versions, write, faults in [hosts[first]]
    ]
    odd = odd_hosts(reports)
    if rank == 0:
        print_table(host_table(reports))
        if line:
            print(line)
        for name, reasons in odd.items():
            print(f"  ODD     {name}: {'; '.join(reasons)}")
        print(
            f"\nThese hosts are not fit for a run: {', '.join(odd)}." if odd else "\nThe hosts are alike.", flush=True
        )
    dist.barrier()
    dist.destroy_process_group()
    return 1 if odd or (alike and not is_right) else 0


def _gather(value: Any) -> list[Any]:
    """Gather an object of every rank, over gloo."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _link(device: torch.device, ranks_per_node: int) -> float:
    """Measure the GB/s that this rank sends to its counterpart on a neighbouring node while it receives as much.

    Of a node's two neighbours the faster one counts: a slow node does not make its neighbours slow.
    """
    rank, nodes = dist.get_rank(), dist.get_world_size() // ranks_per_node
    node, local_rank = divmod(rank, ranks_per_node)
    buffer, best = buffer_on(device), 0.0
    received = torch.empty_like(buffer)
    for shift in (0, 1):
        other = node + 1 if (node + shift) % 2 == 0 else node - 1
        if nodes % 2 == 0:
            other %= nodes
        dist.barrier()
        if nodes == 1 or not 0 <= other < nodes:
            continue
        peer = other * ranks_per_node + local_rank

        def exchange(peer: int = peer) -> None:
            sends = dist.P2POp(dist.isend, buffer, peer)
            receives = dist.P2POp(dist.irecv, received, peer)
            for work in dist.batch_isend_irecv([sends, receives] if rank < peer else [receives, sends]):
                work.wait()

        exchange()
        best = max(best, buffer.nbytes / _seconds(exchange, device) / 1e9)
    return best


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """Measure the mean seconds of an action."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / ROUNDS


def _clocks(ranks_per_node: int) -> list[float]:
    """Measure how many seconds each node's clock is ahead of the median node's: the median over several barriers."""
    offsets = []
    for _ in range(ROUNDS):
        dist.barrier()
        offsets.append(ahead_of_median(_gather(time.time())[::ranks_per_node]))
    return [median(of_node) for of_node in zip(*offsets, strict=True)]


def _host(run_dir: str, speaks: bool) -> tuple[str, dict[str, str], float | None, list[str]]:
    """Describe this host: name, versions, MB/s of its disk, faults. All ranks call it, and one per host speaks."""
    name = socket.gethostname()
    place = _broadcast(_existing(run_dir))
    trial_file = os.path.join(place, f".megarl-preflight-{dist.get_rank()}")
    write, faults = None, []
    if speaks:
        faults = [
            f"{finding.name}: {finding.detail}" for finding in packages() + limits() if finding.state is State.MISSING
        ]
        try:
            write = _write(trial_file)
        except OSError as e:
            faults.append(f"cannot write into {place}: {e.strerror}")
    files = [file for file in _gather(trial_file if write is not None else None) if file is not None]
    if speaks and (unseen := [file for file in files if not os.path.exists(file)]):
        faults.append(f"does not see {len(unseen)} of {len(files)} files that nodes wrote into {place}: no shared disk")
    dist.barrier()
    with suppress(OSError):
        os.remove(trial_file)
    return name, versions() if speaks else {}, write, faults


def _broadcast(value: str) -> str:
    """Return the first rank's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _existing(folder: str) -> str:
    """Return the folder, or the nearest one above it that exists."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _write(file: str) -> float:
    """Write a file to the disk; returns MB/s."""
    part = os.urandom(2**20)  # which no file system makes smaller
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    start = time.perf_counter()
    try:
        for _ in range(WRITTEN // len(part)):
            os.write(descriptor, part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return WRITTEN / (time.perf_counter() - start) / 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

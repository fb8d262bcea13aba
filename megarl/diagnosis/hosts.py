"""Compares the hosts of a job: what each reports of itself, in one table, and which of them is odd. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low, mode

from rich.table import Table

CLOCK_SECONDS = 1.0
"""How far a host's clock may be from the others'."""
SLOW_LINK, SLOW_GPU, SLOW_DISK = 0.5, 0.8, 0.2
"""Shares of the median below which a host is odd; disks vary most."""
LEAST_LINK = 1.0
"""GB/s between two hosts with GPUs, below which their traffic goes over a management network."""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """Describes the GPU of a rank while it works.

    Attributes:
        mhz: clock of its multiprocessors; None if unknown.
        faults: what is wrong with it.
    """

    name: str
    mhz: int | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Describes a host of the job.

    Attributes:
        versions: of Python, packages, code and driver, by name.
        gpus: one per rank; None where torch has none for it.
        link: GB/s to a neighbour while it receives as much; None with a single host, or if ranks lack GPUs.
        write: MB/s into the run's folder; None if that failed.
        ahead: seconds by which its clock is ahead of the median.
        faults: what is wrong with it alone.
    """

    name: str
    versions: Mapping[str, str]
    gpus: tuple[GpuReport | None, ...]
    link: float | None
    write: float | None
    ahead: float
    faults: tuple[str, ...] = ()

    @property
    def mhz(self) -> int | None:
        """Return the clock of the host's slowest GPU, MHz; None if no GPU reports one."""
        return min((gpu.mhz for gpu in self.gpus if gpu is not None and gpu.mhz is not None), default=None)


def ahead_of_median(clocks: Sequence[float]) -> list[float]:
    """Return by how many seconds each clock is ahead of the median, all read at one moment."""
    middle = median_low(clocks)
    return [clock - middle for clock in clocks]


def odd_hosts(hosts: Sequence[HostReport]) -> dict[str, list[str]]:
    """Return the hosts that differ from the others or have faults, with the reasons."""
    reasons: dict[str, list[str]] = {host.name: [*host.faults, *_gpu_faults(host)] for host in hosts}
    for name in hosts[0].versions:
        usual = mode(host.versions.get(name, "none") for host in hosts)
        for host in hosts:
            if (version := host.versions.get(name, "none")) != usual:
                reasons[host.name].append(f"{name} {version}, others have {usual}")
    usual_gpus = mode(_gpus(host) for host in hosts)
    for host in hosts:
        if _gpus(host) != usual_gpus:
            reasons[host.name].append(f"{_gpus(host)}, others have {usual_gpus}")
        if abs(host.ahead) > CLOCK_SECONDS:
            reasons[host.name].append(f"its clock is {abs(host.ahead):.1f} s {'ahead' if host.ahead > 0 else 'behind'}")
        if host.link is not None and host.link < LEAST_LINK and any(host.gpus):
            reasons[host.name].append(f"{host.link:.2f} GB/s to its neighbours: see launch/nccl.env")
    _slow(hosts, reasons, lambda host: host.link, SLOW_LINK, "{:.2f} GB/s to its neighbours")
    _slow(hosts, reasons, lambda host: host.mhz, SLOW_GPU, "a GPU at {:.0f} MHz")
    _slow(hosts, reasons, lambda host: host.write, SLOW_DISK, "writes {:.0f} MB/s into the run's folder")
    return {name: listed for name, listed in reasons.items() if listed}


def host_table(hosts: Sequence[HostReport]) -> Table:
    """Make a table with a row per host."""
    table = Table(box=None, pad_edge=False)
    for title in ("host", "GPUs", "MHz", "link GB/s", "disk MB/s", "clock s", *hosts[0].versions):
        table.add_column(title, no_wrap=True)
    for host in hosts:
        versions = (host.versions.get(name, "none") for name in hosts[0].versions)
        figures = (_figure(host.mhz, ".0f"), _figure(host.link, ".2f"), _figure(host.write, ".0f"))
        table.add_row(host.name, _gpus(host), *figures, f"{host.ahead:+.2f}", *versions)
    return table


def _gpu_faults(host: HostReport) -> list[str]:
    """List the faults of a host's GPUs, by the number that torch gives each."""
    if not any(host.gpus):
        return []
    return [
        f"GPU {number}: {fault}"
        for number, gpu in enumerate(host.gpus)
        for fault in (gpu.faults if gpu is not None else ("torch does not see it",))
    ]


def _gpus(host: HostReport) -> str:
    names = sorted({gpu.name for gpu in host.gpus if gpu is not None})
    count = sum(gpu is not None for gpu in host.gpus)
    return f"{count} x {' and '.join(names)}" if names else "no GPU"


def _slow(
    hosts: Sequence[HostReport],
    reasons: Mapping[str, list[str]],
    figure: Callable[[HostReport], float | None],
    share: float,
    text: str,
) -> None:
    """Add the reason of hosts whose figure is below a share of the median."""
    figures = {host.name: value for host in hosts if (value := figure(host)) is not None}
    middle = median(figures.values()) if figures else 0.0
    for name, value in figures.items():
        if value < share * middle:
            reasons[name].append(f"{text.format(value)}, where the median is {middle:.4g}")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

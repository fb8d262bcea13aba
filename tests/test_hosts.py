"""`megarl doctor CONFIG`: hosts that measure themselves and each other, and which of them is named as odd."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import free_port
from test_commands import COMMAND, ENVIRONMENT
from tiny_run import ROOT, megarl, write_run

from megarl.diagnosis.hosts import GpuReport, HostReport, ahead_of_median, host_table, odd_hosts
from megarl.diagnosis.machine import communication_variables

GPU = GpuReport(name="NVIDIA H100", mhz=1980)
HOSTS = [
    HostReport(
        name=f"node {number} on h{number}",
        versions={"python": "3.12.3", "torch": "2.11.0", "driver": "580.1"},
        gpus=(GPU, GPU),
        link=45.0 + number,
        write=900.0,
        ahead=0.01 * number,
    )
    for number in range(4)
]


def test_hosts_that_are_alike() -> None:
    assert odd_hosts(HOSTS) == {}
    table = host_table(HOSTS)
    assert table.row_count == 4 and [str(column.header) for column in table.columns][-2:] == ["torch", "driver"]


ODD = [
    (
        {"versions": {"python": "3.12.3", "torch": "2.12.0"}},
        ["torch 2.12.0, others have 2.11.0", "driver none, others have 580.1"],
    ),
    ({"gpus": (GPU, None)}, ["GPU 1: torch does not see it", "1 x NVIDIA H100, others have 2 x NVIDIA H100"]),
    ({"gpus": (None, None)}, ["no GPU, others have 2 x NVIDIA H100"]),
    ({"gpus": (GPU, replace(GPU, mhz=1200))}, ["a GPU at 1200 MHz, where the median is 1980"]),
    ({"gpus": (GPU, replace(GPU, faults=("too hot",)))}, ["GPU 1: too hot"]),
    ({"ahead": -1.5}, ["its clock is 1.5 s behind"]),
    ({"ahead": 61.25}, ["its clock is 61.2 s ahead"]),
    ({"link": 12.0}, ["12.00 GB/s to its neighbours, where the median is 45.5"]),
    ({"write": 100.0}, ["writes 100 MB/s into the run's folder, where the median is 900"]),
    ({"write": None, "faults": ("cannot write into /runs",)}, ["cannot write into /runs"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reasons"), ODD, ids=[" ".join(reasons)[:20] for _, reasons in ODD])
def test_the_odd_host_is_named(change: dict[str, object], reasons: list[str]) -> None:
    hosts = [HOSTS[0], HOSTS[1], replace(HOSTS[2], **change), HOSTS[3]]  # type: ignore[arg-type]
    assert odd_hosts(hosts) == {"node 2 on h2": reasons}


def test_all_links_may_be_too_slow() -> None:
    reasons = odd_hosts([replace(host, link=0.11) for host in HOSTS])
    assert [*reasons.values()] == [["0.11 GB/s to its neighbours: see launch/nccl.env"]] * 4


def test_a_clock_is_compared_with_the_median() -> None:
    assert ahead_of_median([100.0, 103.0, 100.5]) == [-0.5, 2.5, 0.0]
    assert ahead_of_median([100.0, 103.0]) == [0.0, 3.0]


def test_variables_that_steer_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in communication_variables():
        monkeypatch.delenv(name)
    for name in ("UCX_TLS", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "FI_PROVIDER", "MY_NCCL_DEBUG"):
        monkeypatch.setenv(name, "x")
    assert [*communication_variables()] == ["FI_PROVIDER", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "UCX_TLS"]


def test_nodes_without_a_configuration_are_refused() -> None:
    done = megarl("doctor", "--nnodes", "2")
    assert (done.returncode, done.stderr) == (
        2, "megarl: error: key=value and --nnodes need a CONFIG: hosts are compared for a run\n"
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs to mount a disk of its own",
)
def test_a_host_with_another_disk_is_named(tmp_path: Path) -> None:
    """The second node has a disk of its own where the run's folder would be."""
    (tmp_path / "runs").mkdir()
    config = write_run(tmp_path, trainer__n_gpus_per_node=1, trainer__default_local_dir=str(tmp_path / "runs" / "a"))
    where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [*COMMAND, "doctor", str(config), *where]
    script = f'mount -t tmpfs tmpfs {tmp_path / "runs"} && exec "$@"'
    elsewhere = ["unshare", "--mount", "bash", "-c", script, "bash", *command, "--node-rank=1"]
    second = subprocess.Popen(elsewhere, cwd=ROOT, env=ENVIRONMENT)
    first = subprocess.run([*command, "--node-rank=0"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert second.wait(timeout=300) == first.returncode == 1, first.stdout + first.stderr
    (odd,) = [line for line in first.stdout.splitlines() if line.startswith("  ODD     node 1 on ")]
    assert f"does not see 1 of 2 files that nodes wrote into {tmp_path}/runs: no shared disk" in odd
    assert os.listdir(tmp_path / "runs") == []

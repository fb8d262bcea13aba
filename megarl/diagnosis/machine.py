"""Checks the machine's GPUs, links, limits, isolation and scheduler. Needs no torch."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from itertools import permutations

from megarl.diagnosis.finding import Finding, State
from megarl.diagnosis.packages import on_gpu, torch_here, version_of
from megarl.version import PACKAGE, commit_of

GIB = 2**30
SHARED_MEMORY = 1 * GIB
OPEN_FILES = 4096
HARMFUL = {
    "NCCL_P2P_DISABLE": "GPUs of a node then talk through the host's memory",
    "NCCL_SHM_DISABLE": "ranks of a node without NVLink then talk through the network",
    "NCCL_IB_DISABLE": "nodes then talk over TCP",
}
"""Variables that slow NCCL down if they are 1, and why."""
STEERING = ("NCCL_", "GLOO_", "UCX_", "FI_")
"""Beginnings of the variables that steer communication."""


def gpus() -> list[Finding]:
    """Check each GPU, the CUDA of driver and torch, and whether the GPUs reach each other's memory."""
    torch = torch_here()
    if torch is None:
        return [Finding("GPUs", State.OPTIONAL, "unknown without torch")]
    built = torch.version.cuda
    driver = _driver()
    if not on_gpu():
        if driver and not built:
            cure = "pip install -r launch/requirements-gpu.txt"
            return [Finding("GPUs", State.OPTIONAL, f"the driver ({driver}) sees them, this torch is for CPUs", cure)]
        if driver:
            cure = "compare `nvidia-smi` with the CUDA that torch is built for; look at CUDA_VISIBLE_DEVICES"
            return [
                Finding("GPUs", State.OPTIONAL, f"the driver ({driver}) sees them, torch (CUDA {built}) none", cure)
            ]
        return [Finding("GPUs", State.OPTIONAL, "none here: ranks run on the CPU over gloo")]
    findings = [Finding("CUDA", State.OK, f"torch's {built}" + (f", driver {driver}" if driver else ""))]
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        used = "" if total - free < 2 * GIB else f", {(total - free) / GIB:.1f} GiB of it in use"
        findings.append(Finding(f"GPU {i}", State.OK, f"{torch.cuda.get_device_name(i)}, {total / GIB:.0f} GiB{used}"))
    return [*findings, *_links(torch.cuda.device_count())]


def _links(count: int) -> list[Finding]:
    """Check the links between the GPUs of this machine."""
    import torch

    if count < 2:
        return []
    pairs = list(permutations(range(count), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    topology = _output("nvidia-smi", "topo", "-m")
    links = len(re.findall(r"\bNV\d+\b", topology))
    via = f"NVLink between {links} of {len(pairs)} pairs" if links else "no NVLink: through PCIe"
    if not apart:
        return [Finding("peer access", State.OK, f"all GPUs read each other's memory; {via}")]
    cure = "reshards go through buckets instead; `nvidia-smi topo -p2p r` says which pairs and why"
    return [Finding("peer access", State.OPTIONAL, f"{len(apart)} of {len(pairs)} pairs have none; {via}", cure)]


def network() -> list[Finding]:
    """Check NCCL's version, gloo, network adapters and the variables that control them."""
    torch = torch_here()
    findings = []
    if torch is not None and on_gpu():
        findings.append(Finding("NCCL", State.OK, ".".join(map(str, torch.cuda.nccl.version()))))
    if torch is not None:
        if torch.distributed.is_available() and torch.distributed.is_gloo_available():
            findings.append(Finding("gloo", State.OK, "there"))
        else:
            findings.append(Finding("gloo", State.MISSING, "absent", "install another torch"))
    for name, harm in HARMFUL.items():
        if os.environ.get(name, "0") not in ("", "0"):
            findings.append(Finding(name, State.OPTIONAL, f"{os.environ[name]}: {harm}", f"unset {name}"))
    steering = [f"{name}={value}" for name, value in communication_variables().items()]
    findings.append(Finding("environment", State.OK, ", ".join(steering) or "no NCCL_* or GLOO_* variable is set"))
    if os.path.isdir("/sys/class/infiniband"):
        adapters = sorted(os.listdir("/sys/class/infiniband"))
        findings.append(Finding("InfiniBand / RoCE", State.OK, f"{len(adapters)} adapters: {', '.join(adapters[:8])}"))
    else:
        findings.append(Finding("InfiniBand / RoCE", State.OPTIONAL, "none here; of use between nodes only"))
    return findings


def communication_variables() -> dict[str, str]:
    """Return the variables of the environment that steer NCCL, gloo, UCX and libfabric, in order."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(STEERING)}


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts of a job, by name."""
    installed = {name: version_of(name) or "none" for name in ("torch", "megatron-core", "megarl")}
    if (working_copy := commit_of(PACKAGE)) is not None:
        commit, changed = working_copy
        installed["megarl"] = f"{commit[:7]}{'-dirty' if changed else ''}"
    return {"python": ".".join(map(str, sys.version_info[:3])), **installed, "driver": _driver() or "none"}


def limits() -> list[Finding]:
    """Check limits that containers and login shells often set too low."""
    findings = []
    if os.path.isdir("/dev/shm"):
        disk = os.statvfs("/dev/shm")
        size = disk.f_blocks * disk.f_frsize
        cure = "" if size >= SHARED_MEMORY else "start the container with --shm-size=16g, or --ipc=host"
        state = State.OPTIONAL if cure else State.OK
        findings.append(Finding("shared memory", state, f"{size / GIB:.1f} GiB in /dev/shm", cure))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    cure = "" if enough else f"ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    findings.append(Finding("open files", State.OK if enough else State.OPTIONAL, _limit(soft), cure))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = locked == resource.RLIM_INFINITY
    cure = "" if free or not on_gpu() else "ulimit -l unlimited (containers: --ulimit memlock=-1), for RDMA"
    findings.append(Finding("locked memory", State.OK if free else State.OPTIONAL, _limit(locked, bytes_=True), cure))
    cpus, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    findings.append(Finding("host", State.OK, f"{cpus} CPUs for this process, {memory / GIB:.0f} GiB of memory"))
    return findings


def sandbox() -> list[Finding]:
    """Check whether rewards can run untrusted programs."""
    if sys.platform != "linux":
        return [Finding("namespaces", State.OPTIONAL, "only on Linux")]
    try:
        from megarl.rewards.sandbox import check_isolation

        check_isolation()
    except ImportError as e:
        return [Finding("namespaces", State.OPTIONAL, f"unknown without {e.name}")]
    except ValueError as e:
        return [Finding("namespaces", State.OPTIONAL, str(e), "only rewards that run programs need them")]
    return [Finding("namespaces", State.OK, "programs run isolated"), _memory_of_programs()]


def _memory_of_programs() -> Finding:
    """Find which of two ways enforces `limits.memory` over all processes of a program."""
    from megarl.isolation.memory_group import memory_group
    from megarl.isolation.memory_watch import INTERVAL

    group = memory_group(1 << 26)
    if group is not None:
        group.close()
        return Finding("memory of programs", State.OK, "a control group holds each to its limit")
    detail = f"no control group can be made: the processes of each are added up every {INTERVAL * 1000:.0f} ms"
    return Finding("memory of programs", State.OK, f"{detail}; what it keeps in /tmp comes on top")


def scheduler() -> list[Finding]:
    """Check Slurm."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return [Finding("Slurm", State.OK, f"within job {job}")]
    if shutil.which("sbatch"):
        version = _output("sbatch", "--version").strip()
        if not version or not _output("sinfo", "--noheader"):
            return [Finding("Slurm", State.OPTIONAL, f"{version or 'sbatch'} names no partition", "sinfo says why")]
        return [Finding("Slurm", State.OK, f"{version}; see slurm/train.sbatch")]
    return [Finding("Slurm", State.OPTIONAL, "not here; of use for several nodes only")]


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()


def _output(*command: str) -> str:
    """Return a program's output; empty if the program is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


def _limit(value: int, *, bytes_: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{value / 2**20:.0f} MiB" if bytes_ else str(value)

"""Check this machine: installed packages, fast paths, obstacles to a run, and how to remove them.

Each line is ok, "-" (optional, or of no use here) or MISSING, with the command that helps. Exit code 0 if a run can
work here, 1 otherwise. --nccl also sends data between the local GPUs (between CPU ranks where there are none).

With CONFIG, all hosts of that run measure themselves and each other: GPUs, links, clocks, the disk of the run's folder,
versions. Start the command on each of them, as `megarl train`. Exit code 1 if a host is odd, which is named.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megarl.cli.nodes import add_nodes, node_rank_of
from megarl.cli.words import keys, split_words
from megarl.diagnosis.finding import Finding, State
from megarl.diagnosis.machine import gpus, limits, network, sandbox, scheduler
from megarl.diagnosis.packages import fast_paths, packages
from megarl.own_code import in_a_line

EXAMPLE = "megarl doctor --nccl"
SECTIONS: dict[str, Callable[[], list[Finding]]] = {
    "Packages": packages,
    "GPUs": gpus,
    "Fast paths": fast_paths,
    "Communication": network,
    "Limits": limits,
    "Sandbox for programs that a policy writes": sandbox,
    "Scheduler": scheduler,
}
_SHOWN = {State.OK: "ok", State.OPTIONAL: "-", State.MISSING: "MISSING"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl doctor`."""
    words: Any = parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="[CONFIG] key=value",
        help="YAML file, and keys to set: compare its hosts",
    )
    words.completer = keys
    parser.add_argument(
        "--nccl", action="store_true", help="all-reduce over the local GPUs, or two CPU ranks: its rate"
    )
    parser.add_argument("--nproc", type=int, help="ranks: with --nccl all GPUs, or 2; else trainer.n_gpus_per_node")
    add_nodes(parser)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print all findings; returns 1 if something is missing that every run needs.

    Raises:
        ValueError: an option is wrong, or the hosts do not meet.
    """
    if args.nproc is not None and args.nproc < 1:
        raise ValueError(f"--nproc {args.nproc} must be 1 or more")
    config, overrides = split_words([*args.words, *rest])
    if config is not None:
        return _compare_hosts(args, config, overrides)
    if overrides or args.nnodes is not None:
        raise ValueError("key=value and --nnodes need a CONFIG: hosts are compared for a run")
    findings = []
    for title, look in SECTIONS.items():
        print(title, flush=True)
        section = looked(title, look)
        findings += section
        for finding in section:
            print(f"  {_SHOWN[finding.state]:<8}{finding.name}: {finding.detail}")
            if finding.cure:
                print(f"          -> {finding.cure}")
    missing = [finding.name for finding in findings if finding.state is State.MISSING]
    if args.nccl and not missing:
        print("All-reduce", flush=True)
        if _all_reduce(args.nproc):
            missing.append("communication between ranks")
    print(f"\nA run cannot work here: {', '.join(missing)}." if missing else "\nA run can work here.")
    return 1 if missing else 0


def looked(title: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """Return a section's findings. A broken installation can raise anything, which becomes a finding, too."""
    try:
        return look()
    except Exception as e:
        return [Finding(title, State.MISSING, in_a_line(e), "reinstall what it names, with launch/requirements.txt")]


def _compare_hosts(args: argparse.Namespace, file: str, overrides: Sequence[str]) -> int:
    """Have the hosts of a run measure themselves and each other; returns 1 if one is odd."""
    from megarl.config import load_config
    from megarl.launcher import launch
    from megarl.nodes import Node
    from megarl.processes import module_command

    counts = {"trainer.n_gpus_per_node": args.nproc, "trainer.nnodes": args.nnodes}
    ranks = [f"{key}={count}" for key, count in counts.items() if count is not None]
    trainer = load_config(file, [*overrides, *ranks]).trainer
    node = Node(nproc=trainer.n_gpus_per_node, nnodes=trainer.nnodes, node_rank=node_rank_of(args, trainer.nnodes))
    if node.nnodes > 1:
        node = replace(node, master_addr=args.master_addr, master_port=args.master_port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = [*module_command("megarl.diagnosis.preflight"), os.path.abspath(trainer.run_dir)]
    return launch(command, node, timeout_minutes=trainer.timeout_minutes)


def _all_reduce(nproc: int | None) -> int:
    import torch

    from megarl.launcher import Node, launch
    from megarl.processes import module_command

    ranks = nproc or torch.cuda.device_count() or 2
    if 0 < torch.cuda.device_count() < ranks:
        raise ValueError(f"--nproc {ranks} is more than the {torch.cuda.device_count()} GPUs here")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return launch(module_command("megarl.diagnosis.all_reduce"), Node(nproc=ranks), timeout_minutes=2)

"""Adds the arguments of commands that run on several machines together."""

from __future__ import annotations

import argparse
import os


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the options `--nnodes`, `--node-rank`, `--master-addr` and `--master-port`."""
    parser.add_argument(
        "--nnodes", type=int, help="number of machines, each of which runs this command; default trainer.nnodes"
    )
    parser.add_argument("--node-rank", type=int, help="this machine's number, from 0; default SLURM_NODEID")
    parser.add_argument("--master-addr", help="with several nodes: host name of node 0")
    parser.add_argument("--master-port", type=int, help="with several nodes: a free port of that host")


def node_rank_of(args: argparse.Namespace, nnodes: int) -> int:
    """Determine this node's number. Raises ValueError if several nodes could not find each other."""
    if nnodes == 1:
        return 0
    node_rank = args.node_rank
    if node_rank is None and "SLURM_NODEID" in os.environ:
        node_rank = int(os.environ["SLURM_NODEID"])
    needed = {"--node-rank": node_rank, "--master-addr": args.master_addr, "--master-port": args.master_port}
    if missing := [option for option, value in needed.items() if value is None]:
        raise ValueError(f"a job of {nnodes} nodes needs {', '.join(missing)} on each of them, or slurm/train.sbatch")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank {node_rank} is not one of {nnodes} nodes: 0 to {nnodes - 1}")
    return node_rank
